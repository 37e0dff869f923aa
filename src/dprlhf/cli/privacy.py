"""The commands about privacy: ``audit``, and those of the group ``privacy``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dprlhf.cli.plan import refuse
from dprlhf.errors import DprlhfError
from dprlhf.privacy import partitions, relations

if TYPE_CHECKING:
    from dprlhf.runs.earlier import Record

privacy = typer.Typer(
    help="Privacy accounting without a recipe.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Users = Annotated[int, typer.Option("--users", help="N, the number of users.")]
Rounds = Annotated[int, typer.Option("--rounds", help="T, the number of rounds.")]
Delta = Annotated[float, typer.Option("--delta", help="δ of the guarantee.")]
Partition = Annotated[
    partitions.Partition,
    typer.Option("--partition", help="How users are assigned to rounds."),
]
Adjacency = Annotated[
    relations.Adjacency | None,
    typer.Option(
        "--adjacency",
        help="How neighbouring datasets differ.",
        show_default="zero-out",
    ),
]
Participations = Annotated[
    int, typer.Option("--participations", help="Rounds that each user takes part in.")
]
Releases = Annotated[
    int, typer.Option("--releases-per-round", help="Noised sums that each round releases.")
]
Bands = Annotated[
    int, typer.Option("--bands", help="Rounds whose noise is correlated; 1 is independent noise.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@privacy.command("epsilon")
def privacy_epsilon(
    users: Users,
    rounds: Rounds,
    delta: Delta,
    noise_multiplier: Annotated[
        float, typer.Option(help="z, the noise's standard deviation over the clip norm.")
    ],
    partition: Partition = "random-allocation",
    adjacency: Adjacency = None,
    participations: Participations = 1,
    releases_per_round: Releases = 1,
    bands: Bands = 1,
    as_json: AsJson = False,
) -> None:
    """Compute ε, an upper bound, from the noise multiplier."""
    from dprlhf.privacy.gaussian import upwards
    from dprlhf.privacy.plan import json_ready, make_plan

    if not noise_multiplier > 0:
        raise DprlhfError(f"--noise-multiplier must be above 0, not {noise_multiplier}")
    made = make_plan(
        users=users,
        rounds=rounds,
        delta=delta,
        noise_multiplier=noise_multiplier,
        partition=partition,
        adjacency=adjacency,
        participations=participations,
        releases_per_round=releases_per_round,
        bands=bands,
    )
    guarantee = made.guarantee
    _warn_delta(delta, users)
    answer = {
        "epsilon": json_ready(guarantee.epsilon),
        "epsilon_lower": json_ready(guarantee.epsilon_lower),
        "accountant": guarantee.accountant,
        "assumptions": list(guarantee.assumptions),
    }
    shown = upwards(guarantee.epsilon, 6)
    text = f"epsilon = {shown} at delta = {delta:g} ({guarantee.accountant})"
    typer.echo(json.dumps(answer) if as_json else text)


@privacy.command("noise")
def privacy_noise(
    users: Users,
    rounds: Rounds,
    delta: Delta,
    epsilon: Annotated[float | None, typer.Option(help="ε to keep within.")] = None,
    max_guess: Annotated[
        float | None,
        typer.Option(help="Or: how often a guess who took part may be right, such as 0.6."),
    ] = None,
    partition: Partition = "random-allocation",
    adjacency: Adjacency = None,
    participations: Participations = 1,
    releases_per_round: Releases = 1,
    bands: Bands = 1,
    as_json: AsJson = False,
) -> None:
    """Find the smallest noise multiplier that keeps within ε, or within a guess's success."""
    from dprlhf.privacy.gaussian import upwards
    from dprlhf.privacy.max_guess import plan_within
    from dprlhf.privacy.plan import make_plan
    from dprlhf.privacy.risk import risk
    from dprlhf.runs.card import percent

    if (epsilon is None) == (max_guess is None):
        raise DprlhfError("give one of --epsilon and --max-guess")
    if epsilon is not None and not 0 < epsilon < math.inf:
        raise DprlhfError(f"--epsilon must be a positive number, not {epsilon}")
    settings: dict[str, Any] = {
        "users": users,
        "rounds": rounds,
        "delta": delta,
        "partition": partition,
        "adjacency": adjacency,
        "participations": participations,
        "releases_per_round": releases_per_round,
        "bands": bands,
    }
    if max_guess is None:
        made = make_plan(epsilon=epsilon, **settings)
    else:
        made = plan_within(max_guess, **settings)
    _warn_delta(delta, users)
    guess = risk([made.mechanism], delta).best_guess
    answer = {
        "noise_multiplier": made.noise_multiplier,
        "epsilon": made.guarantee.epsilon,
        "best_guess": guess,
    }
    z, cost = upwards(made.noise_multiplier, 6), upwards(made.guarantee.epsilon, 6)
    text = f"noise multiplier = {z} (epsilon {cost}; a guess who took part is right in at most"
    typer.echo(json.dumps(answer) if as_json else f"{text} {percent(guess)} of 100 cases)")


@privacy.command("total")
def privacy_total(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    disjoint: Annotated[
        bool,
        typer.Option(help="State that no two of these runs have a user in common."),
    ] = False,
    delta: Annotated[
        float | None,
        typer.Option(help="δ of the total.", show_default="the largest of the runs'"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """State what several runs cost together: stages of a pipeline, or runs on the same users."""
    from dataclasses import asdict

    from dprlhf.privacy.gaussian import upwards
    from dprlhf.privacy.plan import json_ready
    from dprlhf.runs.earlier import total_of, total_of_runs

    records, cost = total_of_runs(runs, disjoint=disjoint, delta=delta)
    alone = [total_of([record]) for record in records]
    if as_json:
        answer = {
            "epsilon": json_ready(cost.epsilon),
            "epsilon_lower": json_ready(cost.epsilon_lower),
            "delta": cost.delta,
            "accountant": cost.accountant,
            "runs": [record.name for record in records],
            "by_run": [
                {
                    **asdict(record),
                    "epsilon": json_ready(own.epsilon),
                    "epsilon_lower": json_ready(own.epsilon_lower),
                }
                for record, own in zip(records, alone, strict=True)
            ],
        }
        typer.echo(json.dumps(answer))
        return
    typer.echo(_total_table(records, [upwards(own.epsilon, 4) for own in alone]))
    shown = upwards(cost.epsilon, 6)
    typer.echo(f"total: epsilon = {shown} at delta = {cost.delta:g} ({cost.accountant})")


_PLAN = "rounds noise_multiplier partition adjacency participations releases_per_round bands"


@privacy.command("risk")
def privacy_risk(
    context: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, taken together; leave out to give the plan as options."),
    ] = None,
    prior: Annotated[
        float, typer.Option(help="Probability that the person took part, as known beforehand.")
    ] = 0.5,
    people: Annotated[
        int, typer.Option(help="Number of people who all took part, or of whom none did.")
    ] = 1,
    delta: Annotated[
        float | None, typer.Option(help="δ of the μ.", show_default="that of the runs")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="T, the number of rounds.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="z, the noise's standard deviation over the clip norm.")
    ] = None,
    partition: Partition = "random-allocation",
    adjacency: Adjacency = None,
    participations: Participations = 1,
    releases_per_round: Releases = 1,
    bands: Bands = 1,
    as_json: AsJson = False,
) -> None:
    """Bound what a guess about a person can gain: rates of right guesses and of a test's hits."""
    from dataclasses import asdict

    from dprlhf.privacy.accounting import Mechanism
    from dprlhf.privacy.gaussian import upwards
    from dprlhf.privacy.plan import json_ready
    from dprlhf.privacy.risk import risk
    from dprlhf.runs.card import hit_rates, percent
    from dprlhf.runs.earlier import risk_of, total_of_runs

    if runs:
        refuse(context, _PLAN.split(), "is that of the runs: leave it out")
        records, _ = total_of_runs(runs, delta=delta)
        measured = risk_of(records, delta, prior=prior, people=people)
    elif rounds is None or noise_multiplier is None or delta is None:
        raise DprlhfError("give a run folder, or --rounds, --noise-multiplier and --delta")
    else:
        mechanism = Mechanism(
            noise_multiplier,
            rounds,
            partition,
            adjacency or relations.DEFAULT_ADJACENCY,
            participations,
            releases_per_round,
            bands,
        )
        measured = risk([mechanism], delta, prior=prior, people=people)
    answer = json_ready(asdict(measured))
    if as_json:
        typer.echo(json.dumps(answer))
        return
    who = "the person" if people == 1 else f"all {people} people or none"
    typer.echo(f"Whether {who} took part, a guess is right in at most, of 100 cases:")
    typer.echo(f"  {percent(measured.best_guess)} at even odds, where chance is right in 50")
    if prior != 0.5:
        chance = percent(max(prior, 1 - prior))
        typer.echo(
            f"  {percent(measured.best_guess_at_prior)} at prior {prior:g}, chance in {chance}"
        )
    typer.echo(hit_rates(answer))
    mu = upwards(measured.gdp_mu, 4)
    typer.echo(f"Gaussian differential privacy: mu = {mu}, but for delta = {measured.delta:g}")


@privacy.command("declare")
def privacy_declare(
    model: Annotated[Path, typer.Argument(help="Folder of a model, as save_pretrained writes it.")],
    noise_multiplier: Annotated[float, typer.Option(help="z of each step.")],
    sample_rate: Annotated[float, typer.Option(help="Chance of a row to be in a step's batch.")],
    steps: Annotated[int, typer.Option(help="Number of steps.")],
    delta: Delta,
    user_column: Annotated[
        list[str] | None,
        typer.Option(help="The column that was protected.", show_default="each row was"),
    ] = None,
    shuffled: Annotated[
        bool,
        typer.Option("--shuffled", help="Batches were shuffled rows, not Poisson samples."),
    ] = False,
    program: Annotated[str, typer.Option(help="The program that trained it.")] = "opacus",
) -> None:
    """Declare that another program trained a model privately, so that later runs count it.

    A run that starts from the model then has to name it: previous: [{run: MODEL}].
    """
    from dprlhf.privacy.gaussian import upwards
    from dprlhf.recipe.data import unit_of
    from dprlhf.runs.declared import declare

    cost = declare(
        model,
        [(noise_multiplier, sample_rate, steps)],
        delta=delta,
        unit=unit_of(user_column or []),
        sampling="shuffled" if shuffled else "poisson",
        program=program,
    )
    shown = upwards(cost.epsilon, 6)
    typer.echo(f"{model}: declared epsilon = {shown} at delta = {delta:g} ({cost.accountant})")


def _total_table(records: Sequence[Record], epsilons: Sequence[str]) -> str:
    """Return a table with a line for each run: what it cost by itself, and its terms."""
    rows = [("run", "stage", "epsilon", "delta", "noise", "rounds", "users in")]
    for record, epsilon in zip(records, epsilons, strict=True):
        terms = record.mechanism
        passes = terms["participations"]
        each = "" if passes == 1 else f", {passes} rounds each"
        tuned = f", and {record.tuning_runs} tuning runs" if record.tuning_runs else ""
        rows.append(
            (
                record.name,
                record.stage,
                epsilon,
                f"{record.delta:g}",
                f"{terms['noise_multiplier']:.4g}",
                str(terms["rounds"]),
                f"{terms['partition']}{each}{tuned}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def audit(
    recipe: Annotated[
        Path,
        typer.Argument(help="A YAML recipe, or a run folder, whose card then states the result."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="With a recipe: changes to it, section.key=value.")
    ] = None,
    canaries: Annotated[
        int | None,
        typer.Option(help="Number of canary users; more see smaller faults.", show_default="10000"),
    ] = None,
    space: Annotated[
        relations.Space,
        typer.Option(help="gradient takes seconds; prompt attacks the recipe's own model."),
    ] = "gradient",
    output_dir: Annotated[
        str | None, typer.Option(help="The new folder of the audit; it must not exist yet.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the guarantee of a recipe or a run with canary users: a lower bound on ε.

    The private data are not read, and no run is charged. Exit status 1: the guarantee is refuted;
    3: so few canaries cannot refute it.
    """
    from dprlhf.audit.one_run import audit as attack
    from dprlhf.audit.one_run import audit_folder, audit_run, report
    from dprlhf.recipe import load_any_recipe

    if recipe.is_dir() and overrides:
        raise DprlhfError("a run is audited as it was made: leave the overrides out")
    folder = output_dir or audit_folder()
    options: dict[str, Any] = {"canaries": canaries, "space": space, "quiet": as_json}
    if not as_json:
        options["announce"] = lambda line: typer.echo(f"power: {line}")
    if recipe.is_dir():
        result = audit_run(recipe, folder, **options)
    else:
        result = attack(load_any_recipe(recipe, overrides or ()), folder, **options)
    typer.echo((Path(folder) / "audit.json").read_text("utf-8") if as_json else report(result))
    if not result.holds:
        typer.echo("the claim is refuted: please report this", err=True)
        raise typer.Exit(1)
    if not result.can_refute:
        raise typer.Exit(3)


def _warn_delta(delta: float, users: int) -> None:
    from dprlhf.privacy.plan import delta_warning

    warning = delta_warning(delta, users)
    if warning:
        print(f"dprlhf: warning: {warning}", file=sys.stderr)
