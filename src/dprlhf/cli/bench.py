"""The commands ``bench control`` and ``bench worth``: comparisons of many runs, measured."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Annotated

import typer

from dprlhf.errors import DprlhfError

bench = typer.Typer(
    help="Measure what privacy buys, and the tables of the source papers.", no_args_is_help=True
)


@bench.callback()
def _bench() -> None:
    """Measure what privacy buys, and the tables of the source papers."""


@bench.command("control")
def bench_control(
    table: Annotated[str, typer.Option(help="hz, rio, riverswim or all.")] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds for each row.")] = 10,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    only: Annotated[str, typer.Option(help="Run only rows whose name contains this text.")] = "",
    recipes: Annotated[Path, typer.Option(help="Folder of the recipes.")] = Path("recipes/control"),
    cache: Annotated[
        Path, typer.Option(help="Folder of finished runs; a second call continues there.")
    ] = Path("runs/control"),
    out: Annotated[
        Path, typer.Option(help="Folder in which results/ and images/ are written.")
    ] = Path("docs"),
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Run nothing; write what is finished.")
    ] = False,
) -> None:
    """Run the control tables; write the results, a table beside the papers' figures, and plots."""
    try:
        from dprlhf.papers.control.results import write
        from dprlhf.papers.control.run_rows import read_table, run_table
        from dprlhf.papers.control.tables import TABLES
    except ModuleNotFoundError as missing:
        from dprlhf.papers import INSTALL

        raise DprlhfError(f"bench needs {missing.name}: {INSTALL}") from None

    if table != "all" and table not in TABLES:
        raise DprlhfError(f"table '{table}' is unknown: use all, {', '.join(TABLES)}")
    if not recipes.is_dir():
        raise DprlhfError(
            f"{recipes}: no such folder: run this in a clone of the repository, or give --recipes"
        )
    names = list(TABLES) if table == "all" else [table]
    if not write_only:
        for name in names:
            rows = [row.name for row in TABLES[name]() if only in row.name]
            if rows:
                run_table(name, seeds=seeds, jobs=jobs, recipes=recipes, cache=cache, only=only)
    found = {name: read_table(name, seeds, cache, recipes) for name in TABLES}
    command = f"dprlhf bench control --table {table} --seeds {seeds}"
    (out / "results").mkdir(parents=True, exist_ok=True)
    typer.echo(write(found, out, command, seeds))


@bench.command("worth")
def bench_worth(
    tasks: Annotated[str, typer.Option(help="Tasks, with commas between them, or all.")] = "all",
    epsilons: Annotated[
        str, typer.Option(help="The private runs' ε, with commas.")
    ] = "0.5,1,2,4,8",
    users: Annotated[
        int, typer.Option(min=1, help="Users, and public prompts in their place.")
    ] = 1500,
    seeds: Annotated[int, typer.Option(min=1, help="Number of paired seeds.")] = 5,
    model: Annotated[
        str, typer.Option(help="small (seconds a run), smollm2, or a hub id or folder.")
    ] = "small",
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    clone: Annotated[Path, typer.Option(help="Folder of the repository.")] = Path(),
    runs: Annotated[
        Path, typer.Option(help="Folder of the runs; a second call continues there.")
    ] = Path("runs/worth"),
    out: Annotated[
        Path, typer.Option(help="Folder in which results/ and images/ are written.")
    ] = Path("docs"),
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Run nothing; write what is finished.")
    ] = False,
) -> None:
    """Compare private users with public prompts alone: value, price and break-even ε.

    On each task of "What does privacy buy?": the private run at every ε, the non-private run, and
    the public alternatives, with paired seeds.
    """
    from dprlhf.papers import INSTALL

    if importlib.util.find_spec("matplotlib") is None:  # not only after hours of runs
        raise DprlhfError(f"bench needs matplotlib: {INSTALL}")
    from dprlhf.worth.comparison import compare
    from dprlhf.worth.pages import write_all
    from dprlhf.worth.tasks import set_up

    names = _tasks(tasks)
    if not (clone / "recipes").is_dir():
        raise DprlhfError(
            f"{clone / 'recipes'}: no such folder: run this in a clone of the repository, or give"
            " --clone"
        )
    place = (runs / model.replace("/", "-")).resolve()
    setup = set_up(model, clone.resolve(), place, write_only=write_only)
    grid = _epsilons(epsilons)
    found = []
    for name in names:
        if not setup.can_run(name):
            typer.echo(f"{name}: not for the model {model}; left out")
            continue
        one = compare(
            setup, name, epsilons=grid, users=users, seeds=seeds, side_by_side=jobs,
            write_only=write_only,
        )  # fmt: skip
        if one is not None:
            found.append(one)
    command = (
        f"dprlhf bench worth --tasks {tasks} --epsilons {epsilons} --users {users}"
        f" --seeds {seeds} --model {model}"
    )
    typer.echo(write_all(found, out, command))


def _tasks(text: str) -> list[str]:
    """Read names of tasks, with commas between them, or ``all``."""
    from dprlhf.worth.tasks import TASKS

    names = list(TASKS) if text == "all" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise DprlhfError(f"task '{unknown[0]}' is unknown: use all, {', '.join(TASKS)}")
    return names


def _epsilons(text: str) -> list[float]:
    """Read finite ε above 0, with commas between them."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < epsilon < math.inf for epsilon in found):
        raise DprlhfError(f"--epsilons {text}: write numbers above 0 with commas, such as 0.5,1,4")
    return sorted(set(found))
