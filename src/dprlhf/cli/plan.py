"""The command ``plan``: rounds and noise before there is a recipe, and the best choices for one."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dprlhf.errors import DprlhfError

Recipe = Annotated[
    Path | None, typer.Argument(help="A YAML recipe; without one, give --users and --epsilon.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="With a recipe: changes to it, section.key=value.")
]
Minutes = Annotated[
    float | None, typer.Option(min=0.1, help="With a recipe: longest duration of the run.")
]
Responses = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With a recipe: most responses to users' prompts in the whole run.",
        show_default="what the recipe takes",
    ),
]
NumGenerations = Annotated[
    list[int] | None,
    typer.Option(min=2, help="With a recipe: responses to a prompt to compare; may be repeated."),
]
Hardware = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="With a recipe: GB of memory of one device; shows what the run takes of it, and the"
        " largest batch sizes that fit. Only the model's configuration and tokenizer are loaded.",
    ),
]
Show = Annotated[int, typer.Option(min=1, help="With a recipe: number of choices.")]
Users = Annotated[int | None, typer.Option(help="Without a recipe: N, the number of users.")]
Epsilon = Annotated[float | None, typer.Option(help="Without a recipe: ε to keep within.")]
Delta = Annotated[float, typer.Option(help="Without a recipe: δ of the guarantee.")]
Dimension = Annotated[int, typer.Option(help="Without a recipe: number of released coordinates.")]
Rounds = Annotated[
    list[int] | None, typer.Option(min=1, help="A number of rounds to compare; may be repeated.")
]
Norm = Annotated[
    float, typer.Option(help="Without a recipe: norm of the users' mean clipped gradient, over S.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_WITH_A_RECIPE = ("minutes", "responses", "num_generations", "show", "hardware")
_WITHOUT_HARDWARE = ("minutes", "responses", "num_generations", "show", "rounds")
_WITHOUT_ONE = ("users", "epsilon", "delta", "dimension", "signal")


def plan(
    context: typer.Context,
    recipe: Recipe = None,
    overrides: Overrides = None,
    minutes: Minutes = None,
    responses: Responses = None,
    num_generations: NumGenerations = None,
    show: Show = 5,
    hardware: Hardware = None,
    users: Users = None,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    dimension: Dimension = 1920,
    rounds: Rounds = None,
    signal: Norm = 0.1,
    as_json: AsJson = False,
) -> None:
    """Choose rounds, passes, bands, partition and responses for an ε and a compute budget.

    With a recipe, signal, reward and time are measured on its public prompts, and the best choices
    are shown with their noise and the predicted rise of the reward. Without a recipe, numbers of
    rounds are compared. No privacy is spent.
    """
    if recipe is None:
        refuse(context, _WITH_A_RECIPE, "needs a recipe")
        if users is None or epsilon is None:
            raise DprlhfError("plan: give a recipe, or --users and --epsilon")
        _warn(epsilon)
        chosen = rounds or [t for t in (1, 4, 16, 32, 64, 100, 200, 1000) if t <= users]
        table = _trade_off(users, chosen, epsilon, delta, dimension, signal)
        if as_json:
            typer.echo(json.dumps(table))
            return
        # m = (√d/ε)^{2/3} N^{1/3}, where DP-PG's two errors balance.
        m = min(users, max(1.0, (math.sqrt(dimension) / epsilon) ** (2 / 3) * users ** (1 / 3)))
        typer.echo(f"{users} users, epsilon {epsilon:g}, delta {delta:g}, d = {dimension}")
        about = f"balanced batch size (He & Zhou, Theorem 2): m = {m:.0f}, T = {users / m:.0f}"
        typer.echo(f"{about}\n\n{_plan_table(table)}")
        return
    refuse(context, _WITHOUT_ONE, "is the recipe's: override its keys, such as privacy.epsilon")
    from dprlhf.recipe import load_recipe
    from dprlhf.training.planner import choose, measure

    loaded = load_recipe(recipe, overrides or ())
    if hardware is not None:
        refuse(context, _WITHOUT_HARDWARE, "has no effect beside --hardware")
        typer.echo(_memory(loaded, hardware, as_json))
        return
    _warn(loaded.privacy.epsilon)
    facts = measure(loaded, responses=num_generations or ())
    choices, passed = choose(
        facts,
        minutes=minutes,
        responses=responses,
        rounds=rounds or (),
        show=show,
        progress=_progress,
    )
    rows = [choice.as_dict() for choice in choices]
    if as_json:
        shown: dict[str, Any] = {**facts.as_dict(), "choices": rows, "not_costed": passed}
        typer.echo(json.dumps(shown))
    else:
        typer.echo(f"{facts.describe()}\n\n{_choices_table(rows)}")
        if passed:
            typer.echo(f"{passed} more were passed over: their noise takes seconds each to compute")
        typer.echo(f"\nthe first as overrides: {' '.join(choices[0].overrides())}")


def _trade_off(
    users: int,
    rounds: Sequence[int],
    epsilon: float,
    delta: float,
    dimension: int,
    signal: float,
) -> list[dict[str, Any]]:
    """Compare partitions and numbers of rounds at the same (ε, δ), one pass."""
    # Over a run of T rounds in which everybody takes part once, a signal s (the norm of the mean
    # clipped contribution over S) sums to T·s, the noise to √T·z√d/m. Their ratio is N·s/(κ√d) with
    # κ = z√T: what random allocation lowers, and rounds raise.
    from dprlhf.privacy.plan import make_plan

    for name, value in {"epsilon": epsilon, "signal": signal}.items():
        if not 0 < value < math.inf:
            raise DprlhfError(f"{name} must be a positive number, not {value}")
    for name, count in {"dimension": dimension, "users": users}.items():
        if count < 1:
            raise DprlhfError(f"{name} must be at least 1, not {count}")
    rows = []
    for partition in ("random-allocation", "fixed"):
        for count in rounds:
            made = make_plan(
                users=users, rounds=count, epsilon=epsilon, delta=delta, partition=partition
            )
            kappa = made.noise_multiplier * math.sqrt(count)
            rows.append(
                {
                    "partition": partition,
                    "adjacency": made.adjacency,
                    "rounds": count,
                    "batch": made.expected_batch_size,
                    "noise_multiplier": made.noise_multiplier,
                    "noise_to_clip_ratio": made.noise_to_clip_ratio(dimension),
                    "kappa": kappa,
                    "signal_to_noise": users * signal / (kappa * math.sqrt(dimension)),
                }
            )
    return rows


def _memory(loaded: Any, gigabytes: float, as_json: bool) -> str:
    """Return what a run takes of a device's memory, as JSON or a text table."""
    from dataclasses import asdict

    from dprlhf.hub import hush_libraries
    from dprlhf.training.memory import USED, memory_of

    hush_libraries()
    memory = memory_of(loaded)
    fitting = memory.fitting(1e9 * gigabytes)
    if as_json:
        return json.dumps({**asdict(memory), "fitting": fitting})
    rows = [
        ("frozen weights", memory.weights),
        (f"training d = {memory.dimension:,}", memory.trained),
        ("logits of an update", memory.logits),
        ("a response, sampled", memory.sampled_response),
        ("a response, updated", memory.updated_response),
    ]
    lines = [f"{name:<28}{size / 1e9:>9.3f} GB" for name, size in rows]
    most = ", ".join(f"{key}={count}" for key, count in fitting.items())
    fits = "nothing fits" if not all(fitting.values()) else f"at most {most}"
    return "\n".join([*lines, f"within {USED:.0%} of {gigabytes:g} GB: {fits}"])


def refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Refuse an option that the call would not use, in place of ignoring it."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise DprlhfError(f"{context.info_name}: --{name.replace('_', '-')} {why}")


def _warn(epsilon: float | None) -> None:
    from dprlhf.privacy.plan import epsilon_warning

    warning = epsilon_warning(epsilon) if epsilon is not None and epsilon < math.inf else None
    if warning:
        print(f"dprlhf: warning: {warning}", file=sys.stderr)


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        end = "\r" if done < of else "\n"
        print(f"plan: {done} of {of} candidates", end=end, file=sys.stderr, flush=True)


_LEGEND = """
kappa         noise over signal of the whole run, by the privacy terms alone: lower is better
signal/noise  summed signal over summed noise of the whole run: higher is better"""
"""What the columns of both tables mean; docs/planning.md has the formulas."""

_OF_CHOICES = """
cosine        expected cosine between a step and the users' mean gradient
rise          predicted rise of the mean reward
above         s: norm of the users' mean gradient over the clip norm; p: released coordinates;
              alignment: cosine between the mean of clipped gradients and the mean gradient"""


def _plan_table(rows: Sequence[dict[str, Any]]) -> str:
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


def _choices_table(rows: Sequence[dict[str, Any]]) -> str:
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
