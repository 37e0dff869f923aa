"""The command ``tune``: settings chosen on public prompts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from dprlhf.cli.train import Overrides
from dprlhf.errors import DprlhfError


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
    from tqdm.auto import tqdm

    from dprlhf.hub import hush_libraries
    from dprlhf.recipe import load_recipe
    from dprlhf.tuning.public_rows import public_rows
    from dprlhf.tuning.search import Search, header, write_tuned
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
    interrupted, started = False, time.monotonic()
    # A terminal or a log may see this bar, since all of it is public.
    shape = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
    seconds = round(60 * minutes)
    with tqdm(total=seconds, desc="tuning", bar_format=shape) as bar:

        def beat() -> None:
            bar.n = min(seconds, time.monotonic() - started)
            bar.refresh()

        try:
            running.run(bar.write, beat)
        except KeyboardInterrupt:
            interrupted = True
    tuned = running.result()
    write_tuned(tuned, recipe, overrides or [], output)
    typer.echo(header(tuned))
    for key, value in tuned.best.changes.items():
        typer.echo(f"  {key} = {value}")
    typer.echo(f"tuned recipe: {output}; the same call goes on with its trials")
    if interrupted:
        raise typer.Exit(130)
