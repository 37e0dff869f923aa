"""The command ``tune``: settings chosen on public prompts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dprlhf.cli.train import Overrides
from dprlhf.errors import DprlhfError

if TYPE_CHECKING:
    from dprlhf.tuning.search import Search


def tune(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe of private updates.")],
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for this call.")] = 30.0,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Most trials of the search, beside the time.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The tuned recipe.")] = Path("tuned.yaml"),
    search: Annotated[
        str,
        typer.Option(
            help="Keys to search, comma-separated, such as rounds,update.clip_norm; empty: all."
        ),
    ] = "",
    public: Annotated[
        Path | None,
        typer.Option(help="File of public prompts, in place of the recipe's evaluation.data."),
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="Number of private users; default: the recipe's.")
    ] = None,
    stand_ins: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Public stand-ins in a run; default: as many as there are users,"
            " or what the time allows.",
        ),
    ] = None,
    scored: Annotated[
        int, typer.Option(min=2, help="Public prompts on which a trial is scored.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
) -> None:
    """Choose settings on public prompts that stand in for the users, at no privacy cost.

    The same call continues a search: its trials are in a file beside the output.
    """
    from dprlhf.hub import hush_libraries
    from dprlhf.recipe import load_recipe
    from dprlhf.tuning.public_rows import public_rows
    from dprlhf.tuning.search import Search
    from dprlhf.tuning.space import keys_of

    if output.exists() and output.resolve() == recipe.resolve():
        raise DprlhfError(f"{output}: is the recipe itself; name another file with --output")
    hush_libraries()
    loaded = load_recipe(recipe, overrides or [])
    running = Search(
        loaded,
        public_rows(loaded, public, scored=scored),
        keys_of([key.strip() for key in search.split(",") if key.strip()]),
        output.with_suffix(".trials"),
        minutes=minutes,
        trials=trials,
        users=users,
        stand_ins=stand_ins,
        seed=seed,
    )
    _run(running, minutes, recipe, overrides or [], output)


def _run(
    running: Search, minutes: float, recipe: Path, overrides: Sequence[str], output: Path
) -> None:
    """Search, also until an interrupt, and write what was found."""
    from dprlhf.tuning.evidence import header, write_tuned

    interrupted = False
    with _bar(60 * minutes) as bar:
        try:
            running.run(bar.write, _beat(bar))
        except KeyboardInterrupt:
            interrupted = True
    tuned = running.result()
    write_tuned(tuned, recipe, overrides, output)
    typer.echo(header(tuned))
    for key, value in tuned.best.changes.items():
        typer.echo(f"  {key} = {value}")
    typer.echo(f"tuned recipe: {output}; the same call goes on with its trials")
    if interrupted:
        raise typer.Exit(130)


@contextlib.contextmanager
def _bar(seconds: float) -> Iterator[Any]:
    """Show a bar over the time; a terminal or a log may see it, since all of it is public."""
    from tqdm.auto import tqdm

    shape = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
    with tqdm(total=round(seconds), desc="tuning", bar_format=shape) as bar:
        yield bar


def _beat(bar: Any) -> Callable[[], None]:
    started = time.monotonic()

    def beat() -> None:
        bar.n = min(bar.total, time.monotonic() - started)
        bar.refresh()

    return beat
