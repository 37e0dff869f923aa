"""Text that commands print: the results of a run or of a supervised stage."""

from __future__ import annotations

import json
import os
from typing import Any

import typer

from dprlhf.errors import one_line


def show(result: Any) -> None:
    """Print a finished run: some continuations, the guarantee, the reward before and after."""
    from dprlhf.runs.model_card import guarantee_sentence

    if int(os.environ.get("RANK", "0")):
        return
    card = json.loads(result.folder.privacy.read_text("utf-8"))
    for sample in result.samples[:5]:
        typer.echo(f"\n{flat(sample['prompt'])}")
        typer.echo(f"  before ({sample['reward_before']:+.2f}): {flat(sample['before'])}")
        typer.echo(f"  after  ({sample['reward_after']:+.2f}): {flat(sample['after'])}")
    typer.echo(f"\nguarantee: {guarantee_sentence(card)}")
    if result.before is not None:
        typer.echo(
            f"reward on {result.before.prompts} held-out public prompts:"
            f" before {result.before.mean:+.3f} ± {result.before.standard_error:.3f},"
            f" after {result.after.mean:+.3f} ± {result.after.standard_error:.3f}"
            f" (rise {result.difference.mean:+.3f} ± {result.difference.standard_error:.3f})"
        )
        for line in measured(result):
            typer.echo(line)
    typer.echo(f"run folder: {result.folder.path}")


def measured(result: Any) -> list[str]:
    """Return lines with the win rate and the measures of public responses."""
    from dprlhf.recipe.evaluation import measure_label

    def pair(name: str, before: Any, after: Any) -> str:
        errors = [
            f" ± {e.standard_error:.3f}" if e.standard_error >= 0 else "" for e in (before, after)
        ]
        return f"{name}: before {before.mean:.3f}{errors[0]}, after {after.mean:.3f}{errors[1]}"

    before, after = result.before, result.after
    lines = []
    for name, compared in result.compared.items():
        rate = compared.win_rate
        lines.append(
            f"win rate against the base model by {name}: {rate.rate:.1%}"
            f" (95% interval {rate.low:.1%} to {rate.high:.1%}; ties count half)"
        )
    return lines + [
        pair(measure_label(n), e, after.measures[n]) for n, e in before.measures.items()
    ]


def show_stage(result: Any) -> None:
    """Print a finished supervised stage: the guarantee, the public loss, and the model folder."""
    from dprlhf.runs.model_card import guarantee_sentence

    if int(os.environ.get("RANK", "0")):
        return
    typer.echo(
        f"guarantee: {guarantee_sentence(json.loads(result.folder.privacy.read_text('utf-8')))}"
    )
    for name, before in result.before.items():
        after = result.after[name]
        typer.echo(
            f"{name} on {before.prompts} public rows: before {before.mean:.4f} ±"
            f" {before.standard_error:.4f}, after {after.mean:.4f} ± {after.standard_error:.4f}"
        )
    for name, value in getattr(result, "value", {}).items():
        typer.echo(f"feedback that the {name} policy gets, from the users' logs: {value}")
    typer.echo(f"run folder: {result.folder.path}; the next stage names {result.folder.model}")


def flat(text: Any) -> str:
    """Return a text, or the JSON of chat messages, on one line."""
    return one_line(text if isinstance(text, str) else json.dumps(text), None)
