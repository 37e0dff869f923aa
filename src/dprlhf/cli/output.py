"""Text that commands print: the results of a run or of a supervised stage, and tables."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
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


_LEGEND = """
kappa         noise over signal of the whole run, by the privacy terms alone: lower is better
signal/noise  summed signal over summed noise of the whole run: higher is better"""
"""What the columns of both tables mean; docs/planning.md has the formulas."""

_OF_CHOICES = """
cosine        expected cosine between a step and the users' mean gradient
rise          predicted rise of the mean reward
above         s: norm of the users' mean gradient over the clip norm; p: released coordinates;
              alignment: cosine between the mean of clipped gradients and the mean gradient"""


def plan_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of ``dprlhf plan`` without a recipe as a text table with a header."""
    header = (
        f"{'partition':<18}{'rounds':>7}{'users a round':>15}{'noise multiplier':>18}"
        f"{'noise/clip':>12}{'kappa':>8}{'signal/noise':>14}"
    )
    lines = [
        f"{row['partition']:<18}{row['rounds']:>7}{row['batch']:>15.1f}"
        f"{row['noise_multiplier']:>18.4f}{row['noise_to_clip_ratio']:>12.3f}"
        f"{row['kappa']:>8.2f}{row['signal_to_noise']:>14.2f}"
        for row in rows
    ]
    return "\n".join([header, *lines, _LEGEND])


def choices_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures of the planner's choices as a table with a header."""
    header = (
        f"{'partition':<18}{'rounds':>7}{'passes':>7}{'bands':>6}{'responses':>10}{'users':>8}"
        f"{'noise':>8}{'kappa':>7}{'cosine':>8}{'signal/noise':>13}{'minutes':>9}{'rise':>7}"
    )
    lines = []
    for row in rows:
        minutes = "" if row["seconds"] is None else f"{row['seconds'] / 60:.1f}"
        rise = "" if row["predicted_rise"] is None else f"{row['predicted_rise']:.2f}"
        lines.append(
            f"{row['partition']:<18}{row['rounds']:>7}{row['participations']:>7}"
            f"{row['bands']:>6}{row['responses']:>10}{row['batch']:>8.1f}"
            f"{row['noise_multiplier']:>8.3f}{row['kappa']:>7.2f}{row['cosine']:>8.3f}"
            f"{row['signal_to_noise']:>13.2f}{minutes:>9}{rise:>7}"
        )
    return "\n".join([header, *lines, _LEGEND + _OF_CHOICES])


def flat(text: Any) -> str:
    """Return a text, or the JSON of chat messages, on one line."""
    return one_line(text if isinstance(text, str) else json.dumps(text), None)
