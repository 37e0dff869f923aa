"""The command line. Heavy libraries load inside the commands, so that accounting starts fast."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dprlhf.errors import DprlhfError

# Idle threads that spin starve each other when cores are busy: a training step on two busy cores
# was measured ten times slower. Read by the OpenMP runtime when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Libraries' notices of what will change are for developers.
warnings.simplefilter("ignore", FutureWarning)

app = typer.Typer(
    help="Private RLHF: tune language models on private prompts, with a guarantee.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
privacy = typer.Typer(help="Exact privacy accounting.", no_args_is_help=True)
assets = typer.Typer(help="The demo's models and data.", no_args_is_help=True)
app.add_typer(privacy, name="privacy")
app.add_typer(assets, name="assets")

Users = Annotated[int, typer.Option("--users", help="N, the number of users (prompts)")]
Rounds = Annotated[int, typer.Option("--rounds", help="T, the number of rounds")]
Delta = Annotated[float, typer.Option("--delta", help="δ of the guarantee")]
Partition = Annotated[
    str,
    typer.Option("--partition", help="random-allocation, fixed, stream or poisson"),
]
Adjacency = Annotated[
    str | None,
    typer.Option("--adjacency", help="add-remove, zero-out or replace-one"),
]
Participations = Annotated[
    int, typer.Option("--participations", help="rounds that a user takes part in")
]
Releases = Annotated[
    int, typer.Option("--releases-per-round", help="noised sums that a round takes from its users")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="a YAML recipe")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as many as you like")
    ] = None,
    output_dir: Annotated[str | None, typer.Option(help="the run folder; must not exist")] = None,
) -> None:
    """Tune a policy privately by a recipe."""
    from dprlhf.api import train as run

    with _interruptible():
        show(run(recipe, overrides=overrides or (), output_dir=output_dir))


@app.command()
def resume(run: Annotated[Path, typer.Argument(help="the run folder")]) -> None:
    """Continue an interrupted run; users already spent are never drawn again."""
    from dprlhf.api import resume as continue_run

    with _interruptible():
        show(continue_run(run))


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    prompt: Annotated[list[str], typer.Option("--prompt", help="a prompt; may be repeated")],
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
) -> None:
    """Continue prompts with the base and with the tuned policy, side by side."""
    from dprlhf.api import generate as continue_prompts

    for answer in continue_prompts(run, prompt, seed):
        typer.echo(f"{answer['prompt']}\n  base:  {_flat(answer['base'])}")
        typer.echo(f"  tuned: {_flat(answer['tuned'])}")


@app.command()
def plan(
    users: Users,
    epsilon: Annotated[float, typer.Option(help="ε to plan for")],
    delta: Delta = 1e-5,
    dimension: Annotated[int, typer.Option(help="d, the trainable parameters")] = 1920,
    rounds: Annotated[list[int] | None, typer.Option(help="T to compare; may be repeated")] = None,
    signal: Annotated[
        float, typer.Option(help="norm of the mean clipped contribution over S")
    ] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Show what rounds, partition and dimension cost: noise, and signal over noise."""
    from dprlhf.plan import balanced_batch, trade_off

    chosen = rounds or [t for t in (1, 4, 16, 32, 64, 100, 200, 1000) if t <= users]
    table = trade_off(users, chosen, epsilon, delta, dimension, signal)
    if as_json:
        typer.echo(json.dumps(table))
        return
    m = balanced_batch(users, epsilon, dimension)
    typer.echo(f"{users} users, epsilon {epsilon:g}, delta {delta:g}, d = {dimension}")
    typer.echo(f"balanced batch size (He & Zhou, Theorem 2): m = {m:.0f}, T = {users / m:.0f}\n")
    typer.echo(
        f"{'partition':<18}{'rounds':>7}{'users a round':>15}{'noise multiplier':>18}"
        f"{'noise/clip':>12}{'kappa':>8}{'signal/noise':>14}"
    )
    for row in table:
        typer.echo(
            f"{row['partition']:<18}{row['rounds']:>7}{row['batch']:>15.1f}"
            f"{row['noise_multiplier']:>18.4f}{row['noise_to_clip_ratio']:>12.3f}"
            f"{row['kappa']:>8.2f}{row['signal_to_noise']:>14.2f}"
        )


@privacy.command("epsilon")
def privacy_epsilon(
    users: Users,
    rounds: Rounds,
    noise_multiplier: Annotated[float, typer.Option(help="z = noise std / clip norm")],
    delta: Delta,
    partition: Partition = "random-allocation",
    adjacency: Adjacency = None,
    participations: Participations = 1,
    releases_per_round: Releases = 1,
    as_json: AsJson = False,
) -> None:
    """Compute ε, an upper bound, from the noise multiplier."""
    from dprlhf.plan import make_plan

    if not noise_multiplier > 0:
        raise DprlhfError(f"--noise-multiplier must be above 0, not {noise_multiplier}")
    made = make_plan(
        users=users,
        rounds=rounds,
        delta=delta,
        noise_multiplier=noise_multiplier,
        partition=partition,  # type: ignore[arg-type]
        adjacency=adjacency,  # type: ignore[arg-type]
        participations=participations,
        releases_per_round=releases_per_round,
    )
    guarantee = made.guarantee
    _warn_delta(delta, users)
    answer = {
        "epsilon": _finite(guarantee.epsilon),
        "epsilon_lower": _finite(guarantee.epsilon_lower),
        "accountant": guarantee.accountant,
        "assumptions": list(guarantee.assumptions),
    }
    text = f"epsilon = {guarantee.epsilon:.6g} at delta = {delta:g} ({guarantee.accountant})"
    typer.echo(json.dumps(answer) if as_json else text)


@privacy.command("noise")
def privacy_noise(
    users: Users,
    rounds: Rounds,
    epsilon: Annotated[float, typer.Option(help="ε to keep within")],
    delta: Delta,
    partition: Partition = "random-allocation",
    adjacency: Adjacency = None,
    participations: Participations = 1,
    releases_per_round: Releases = 1,
    as_json: AsJson = False,
) -> None:
    """Find the smallest noise multiplier that keeps within ε."""
    from dprlhf.plan import make_plan

    if not 0 < epsilon < math.inf:
        raise DprlhfError(f"--epsilon must be a positive number, not {epsilon}")
    made = make_plan(
        users=users,
        rounds=rounds,
        delta=delta,
        epsilon=epsilon,
        partition=partition,  # type: ignore[arg-type]
        adjacency=adjacency,  # type: ignore[arg-type]
        participations=participations,
        releases_per_round=releases_per_round,
    )
    _warn_delta(delta, users)
    answer = {"noise_multiplier": made.noise_multiplier, "epsilon": made.guarantee.epsilon}
    text = f"noise multiplier = {made.noise_multiplier:.6g} (epsilon {made.guarantee.epsilon:.6g})"
    typer.echo(json.dumps(answer) if as_json else text)


@assets.command("pull")
def assets_pull(
    names: Annotated[list[str] | None, typer.Argument(help="which; all by default")] = None,
) -> None:
    """Fetch the demo's models and data, and build what is made of them, once."""
    from dprlhf.assets import pull

    for name, path in pull(names).items():
        typer.echo(f"{name}: {path}")


@assets.command("list")
def assets_list() -> None:
    """List the assets and whether they are ready."""
    from dprlhf.assets import status

    for asset in status():
        typer.echo(f"{asset.name:<18}{'ready' if asset.ready else 'missing':<9}{asset.about}")


def main() -> None:
    """Run a command; a known problem is one line and exit status 2."""
    try:
        app(standalone_mode=True)
    except DprlhfError as error:
        print(f"dprlhf: {error}", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    # Inside the command: typer turns a KeyboardInterrupt that reaches it into a bare "Aborted!".
    try:
        yield
    except KeyboardInterrupt as interrupt:
        print(f"\ndprlhf: {interrupt or 'interrupted before the first round'}", file=sys.stderr)
        raise typer.Exit(130) from None


def show(result: Any) -> None:
    """Print the end of a run: the guarantee, the reward before and after, some continuations."""
    from dprlhf.card import guarantee_sentence

    if int(os.environ.get("RANK", "0")):
        return
    card = json.loads(result.folder.privacy.read_text())
    for sample in result.samples[:5]:
        typer.echo(f"\n{_flat(sample['prompt'])}")
        typer.echo(f"  before ({sample['reward_before']:+.2f}): {_flat(sample['before'])}")
        typer.echo(f"  after  ({sample['reward_after']:+.2f}): {_flat(sample['after'])}")
    typer.echo(f"\nguarantee: {guarantee_sentence(card)}")
    if result.before is not None:
        typer.echo(
            f"reward on {result.before.prompts} held-out public prompts:"
            f" before {result.before.mean:+.3f} ± {result.before.standard_error:.3f},"
            f" after {result.after.mean:+.3f} ± {result.after.standard_error:.3f}"
            f" (rise {result.difference.mean:+.3f} ± {result.difference.standard_error:.3f})"
        )
    typer.echo(f"run folder: {result.folder.path}")


def _flat(text: Any) -> str:
    return " ".join((text if isinstance(text, str) else json.dumps(text)).split())


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "infinity"


def _warn_delta(delta: float, users: int) -> None:
    from dprlhf.plan import delta_warning

    warning = delta_warning(delta, users)
    if warning:
        print(f"dprlhf: warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    main()
