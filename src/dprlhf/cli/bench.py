"""The command ``bench control``: the source papers' tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dprlhf.errors import DprlhfError

bench = typer.Typer(
    help="Run the tables of the source papers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@bench.callback()
def _bench() -> None:
    """Run the tables of the source papers."""


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
    out: Annotated[Path, typer.Option(help="Folder in which results/ is written.")] = Path("docs"),
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Run nothing; write what is finished.")
    ] = False,
) -> None:
    """Run the control tables; write the results, and a table beside the papers' figures."""
    from dprlhf.papers.control.results import write
    from dprlhf.papers.control.run_rows import run_table
    from dprlhf.papers.control.tables import TABLES

    if table != "all" and table not in TABLES:
        raise DprlhfError(f"table '{table}' is unknown: use all, {', '.join(TABLES)}")
    if not recipes.is_dir():
        raise DprlhfError(
            f"{recipes}: no such folder: run this in a clone of the repository, or give --recipes"
        )
    if not write_only:
        for name in TABLES if table == "all" else [table]:
            run_table(name, seeds=seeds, jobs=jobs, recipes=recipes, cache=cache, only=only)
    measured = {
        name: run_table(
            name, seeds=seeds, recipes=recipes, cache=cache, write_only=True, quiet=True
        )
        for name in TABLES
    }
    command = f"dprlhf bench control --table {table} --seeds {seeds}"
    (out / "results").mkdir(parents=True, exist_ok=True)
    typer.echo(write(measured, out, command, seeds))
