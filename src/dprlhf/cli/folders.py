"""The commands on a run's folder: ``report``, ``comply``, ``generate``, ``merge``, ``push``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dprlhf.cli.train import flat
from dprlhf.errors import DprlhfError

Run = Annotated[Path, typer.Argument(help="The folder of the run.")]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are compared.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write.", show_default="RUN/report.html")
    ] = None,
) -> None:
    """Write an HTML report on a run, or a comparison of several, as one file."""
    from dprlhf.runs.report import write_report

    typer.echo(write_report(runs, out))


def comply(
    run: Run,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write to.", show_default="RUN/comply")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(help="Your organisation's threshold for ε.")
    ] = None,
) -> None:
    """Write evidence for an assessor: one page and one JSON with this run's figures on privacy.

    Exit status 1: there are alerts, which are printed too.
    """
    from dprlhf.runs.evidence import write_evidence

    written = write_evidence(run, out, limit=limit)
    typer.echo(f"{written.page}\n{written.json}")
    for alert in written.alerts:
        typer.echo(f"alert: {alert}", err=True)
    if written.alerts:
        raise typer.Exit(1)


def generate(
    run: Run,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt; may be repeated.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of prompts: text with one a line, or .csv, .jsonl, .parquet."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="The longest continuation, in tokens.", show_default="the recipe's"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Continue prompts with the base model and with the tuned one, side by side."""
    from dprlhf.generation import generate as continue_prompts

    if (prompt is None) == (prompts is None):
        raise DprlhfError("give --prompt, as often as you like, or a file with --prompts")
    answers = continue_prompts(run, prompts or prompt or [], seed, max_new_tokens=max_new_tokens)
    if as_json:
        typer.echo(json.dumps(answers))
        return
    for answer in answers:
        typer.echo(f"{flat(answer['prompt'])}\n  base:  {flat(answer['base'])}")
        typer.echo(f"  tuned: {flat(answer['tuned'])}")


def merge(
    run: Run,
    out: Annotated[Path, typer.Argument(help="The model folder to write.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Number format of the written weights.")
    ] = "float32",
) -> None:
    """Merge the adapter into the base model: whole weights, which load without PEFT."""
    from dprlhf.runs.publish import merge as write_merged

    typer.echo(write_merged(run, out, dtype=dtype))


def push(
    run: Run,
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the Hugging Face hub.")],
    public: Annotated[
        bool, typer.Option("--public/--private", help="Make it a repository for everybody.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be uploaded; upload nothing.")
    ] = False,
) -> None:
    """Upload the adapter and its model card to the Hugging Face hub."""
    from dprlhf.runs.publish import files_to_push
    from dprlhf.runs.publish import push as upload

    if dry_run:
        files = [f"  {file} ({size:,} bytes)" for file, size in files_to_push(run)]
        place = f"to the {'public' if public else 'private'} repository {repo}, if it is new:"
        typer.echo("\n".join([place, *files]))
    else:
        typer.echo(upload(run, repo, private=not public))


def erase(
    run: Run,
    user: Annotated[
        list[str],
        typer.Option(
            "--user",
            help="A name in the user column, or without one the number of a row; may be repeated.",
        ),
    ],
) -> None:
    """Leave people who withdraw out of all that a stopped run has not released yet.

    Prints what the released rounds can still reveal of all who have withdrawn so far.
    """
    from dprlhf.runs.card import percent
    from dprlhf.runs.withdrawal import STATEMENTS
    from dprlhf.runs.withdrawal import erase as withdraw

    said = withdraw(run, user)
    typer.echo(
        f"{said['people']} withdrew; released before: {said['released']} of {said['rounds']} rounds"
    )
    if said["risk"] is None:
        typer.echo("no noise was added: nothing bounds what the released rounds reveal")
    else:
        typer.echo(
            "from all that is ever released, a guess whether they took part is right in at most"
            f" {percent(said['risk']['best_guess'])} of 100 cases, chance in 50"
        )
    typer.echo(
        f"statement in secret/{STATEMENTS}; their rows may be deleted now; go on with:"
        f" dprlhf resume {run}"
    )
