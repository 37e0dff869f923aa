"""The commands that take a finished run's folder: ``report``, ``generate``, ``merge``, ``push``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dprlhf.cli.output import flat
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
    from dprlhf.api import generate as continue_prompts

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
    private: Annotated[bool, typer.Option(help="Make it a private repository.")] = False,
) -> None:
    """Upload the adapter and its model card to the Hugging Face hub."""
    from dprlhf.runs.publish import push as upload

    typer.echo(upload(run, repo, private=private))
