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
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from dprlhf.cli.output import flat, plan_table, show, show_stage
from dprlhf.errors import DprlhfError, one_line
from dprlhf.privacy import relations

# Idle threads that spin starve each other when cores are busy: a training step on two busy cores
# was measured ten times slower. Read by the OpenMP runtime when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Libraries' notices of what will change are for developers.
warnings.simplefilter("ignore", FutureWarning)


class OneLineErrors(TyperGroup):
    """Commands whose wrong values are reported as other known problems are: in one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command.

        Raises:
            DprlhfError: a value is missing or wrong; the line names the option.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            raise DprlhfError(one_line(error.format_message(), None)) from None


app = typer.Typer(
    cls=OneLineErrors,
    help="Private RLHF: tune language models on private prompts, with a guarantee.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
privacy = typer.Typer(help="Exact privacy accounting.", no_args_is_help=True)
assets = typer.Typer(help="The demo's models and data.", no_args_is_help=True)
app.add_typer(privacy, name="privacy")
app.add_typer(assets, name="assets")
bench = typer.Typer(help="The papers' tables, measured.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Users = Annotated[int, typer.Option("--users", help="N, the number of users (prompts)")]
Rounds = Annotated[int, typer.Option("--rounds", help="T, the number of rounds")]
Delta = Annotated[float, typer.Option("--delta", help="δ of the guarantee")]
Partition = Annotated[
    relations.Partition, typer.Option("--partition", help="how users are spread over rounds")
]
Adjacency = Annotated[
    relations.Adjacency | None,
    typer.Option("--adjacency", help="how neighbouring datasets differ; by default the usual one"),
]
Participations = Annotated[
    int, typer.Option("--participations", help="rounds that a user takes part in")
]
Releases = Annotated[
    int, typer.Option("--releases-per-round", help="noised sums that a round takes from its users")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, as many as you like")
]
OutputDir = Annotated[
    str | None,
    typer.Option("--output-dir", "--output_dir", help="the run folder; must not exist"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the plan; charge and write nothing")]
PlanAsJson = Annotated[bool, typer.Option("--json", help="print the plan as JSON")]


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    recipe: Annotated[Path, typer.Argument(help="a YAML recipe")],
    overrides: Overrides = None,
    output_dir: OutputDir = None,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
) -> None:
    """Tune a policy privately by a recipe. Flags named as in TRL work beside section.key=value."""
    from dprlhf.cli.trl_flags import overrides_of

    changes = overrides_of(overrides or ())
    if dry_run:
        from dprlhf.recipe import load_recipe
        from dprlhf.training.dry_run import dry_run as look_ahead

        _show_plan(look_ahead(load_recipe(recipe, changes)), as_json)
        return
    from dprlhf.api import train as run

    with _interruptible():
        show(run(recipe, overrides=changes, output_dir=output_dir))


@app.command()
def sft(
    recipe: Annotated[Path, typer.Argument(help="a YAML recipe with stage: sft")],
    overrides: Overrides = None,
    output_dir: OutputDir = None,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
) -> None:
    """Fit a policy to private documents (supervised fine-tuning), before private updates."""
    _stage("sft", recipe, overrides, output_dir, dry_run, as_json)


@app.command()
def reward(
    recipe: Annotated[Path, typer.Argument(help="a YAML recipe with stage: reward")],
    overrides: Overrides = None,
    output_dir: OutputDir = None,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
) -> None:
    """Fit a reward model to private preference pairs or labels."""
    _stage("reward", recipe, overrides, output_dir, dry_run, as_json)


def _stage(
    name: str,
    recipe: Path,
    overrides: list[str] | None,
    output_dir: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    from dprlhf.training.supervised import stage_recipe, train_stage

    loaded = stage_recipe(recipe, overrides or ())
    if loaded.stage != name:
        raise DprlhfError(
            f"{recipe}: a recipe of stage {loaded.stage}: run it with dprlhf {loaded.stage}"
        )
    if dry_run:
        from dprlhf.training.dry_run import dry_run_stage

        _show_plan(dry_run_stage(loaded), as_json)
        return
    with _interruptible():
        show_stage(train_stage(loaded, output_dir=output_dir))


def _show_plan(plan: dict[str, Any], as_json: bool) -> None:
    from dprlhf.training.dry_run import explain

    if not int(os.environ.get("RANK", "0")):
        typer.echo(json.dumps(plan) if as_json else explain(plan))


@app.command()
def resume(run: Annotated[Path, typer.Argument(help="the run folder")]) -> None:
    """Continue an interrupted run of any stage; users already spent are never drawn again."""
    from dprlhf.api import resume as continue_run
    from dprlhf.recipe import Recipe, load_any_recipe
    from dprlhf.runs.folder import RunFolder
    from dprlhf.training.supervised import resume_stage

    held = RunFolder(run).recipe
    with _interruptible():
        if held.is_file() and not isinstance(load_any_recipe(held), Recipe):
            show_stage(resume_stage(run))
        else:
            show(continue_run(run))


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="a prompt; may be repeated")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="a file of prompts, one a line, or a .csv, .jsonl, ...")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="of a continuation; the recipe's by default")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with the base and with the tuned policy, side by side."""
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


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run folders; several are compared")],
    out: Annotated[Path | None, typer.Option(help="the HTML file; RUN/report.html")] = None,
) -> None:
    """Write one HTML file about a run, or a comparison of several."""
    from dprlhf.runs.report import write_report

    typer.echo(write_report(runs, out))


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    repo: Annotated[str, typer.Argument(help="owner/name on the Hugging Face hub")],
    private: Annotated[bool, typer.Option(help="make it a private repository")] = False,
) -> None:
    """Upload a run's adapter with its model card."""
    from dprlhf.runs.publish import push as upload

    typer.echo(upload(run, repo, private=private))


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    out: Annotated[Path, typer.Argument(help="the new model folder")],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="of the weights")
    ] = "float32",
) -> None:
    """Write base model and adapter as one model that loads without PEFT."""
    from dprlhf.runs.publish import merge as write_merged

    typer.echo(write_merged(run, out, dtype=dtype))


@app.command("reward-check")
def reward_check(
    function: Annotated[str, typer.Argument(help="package.module:function, or file.py:function")],
    prompts: Annotated[Path, typer.Option(help="a file of PUBLIC prompts")],
    prompt_column: Annotated[str, typer.Option(help="of the prompts")] = "prompt",
    completion_column: Annotated[
        str, typer.Option(help="of completions to score; without it, stand-ins are scored")
    ] = "completion",
    per_user: Annotated[bool, typer.Option(help="the reward compares one user's rows")] = False,
    reward_range: Annotated[float, typer.Option(help="R of the recipe")] = 3.0,
    limit: Annotated[int, typer.Option(help="rows to use")] = 64,
) -> None:
    """Check a reward's contract on public prompts, and show how it scores."""
    import rich

    from dprlhf.cli.reward_check import explain
    from dprlhf.cli.reward_check import reward_check as check

    found, stand_ins = check(
        function,
        prompts,
        prompt_column=prompt_column,
        completion_column=completion_column,
        per_user=per_user,
        reward_range=reward_range,
        limit=limit,
    )
    rich.print(explain(found, reward_range))
    if stand_ins:
        typer.echo(
            f"There is no column '{completion_column}': stand-in texts were scored, so range and"
            " histogram are not those of real responses."
        )


@app.command()
def doctor() -> None:
    """Show versions, devices, processes and assets, and what a run would miss."""
    from dprlhf.cli.doctor import examine

    findings = examine()
    for finding in findings:
        mark = "ok" if finding.good else "BAD"
        typer.echo(f"{mark:<4}{finding.name:<26}{finding.value}")
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


@app.command()
def init(
    model: Annotated[str, typer.Option(prompt="Model (hub id or folder)")],
    prompts: Annotated[str, typer.Option(prompt="Private prompts (file, folder or hub id)")],
    user_column: Annotated[
        str, typer.Option(prompt="Column that names the user (empty: every row is a user)")
    ] = "",
    reward: Annotated[
        str, typer.Option(prompt="Reward (file.py:function, or a classifier)")
    ] = "my_rewards.py:reward",
    public_prompts: Annotated[
        str, typer.Option(prompt="Public prompts for the evaluation (empty: none)")
    ] = "",
    epsilon: Annotated[float, typer.Option(prompt="Privacy budget epsilon")] = 4.0,
    out: Annotated[Path, typer.Option(help="the file to write; must not exist")] = Path(
        "recipe.yaml"
    ),
) -> None:
    """Ask six questions and write a commented recipe. Options answer in advance."""
    from dprlhf.cli.init import check_files, new_recipe, target_of, users_in
    from dprlhf.runs.folder import write_atomically

    if out.exists():
        raise DprlhfError(f"{out}: exists; name another file with --out")
    check_files(prompts=prompts, reward=reward, public_prompts=public_prompts)
    text = new_recipe(
        model=model,
        prompts=prompts,
        user_column=user_column,
        reward=reward,
        public_prompts=public_prompts,
        epsilon=epsilon,
        target=target_of(model),
        users=users_in(prompts, user_column),
    )
    write_atomically(out, text)
    typer.echo(f"{out}; look at it, then: dprlhf train {out} --dry-run")


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
    from dprlhf.privacy.plan import balanced_batch, trade_off

    chosen = rounds or [t for t in (1, 4, 16, 32, 64, 100, 200, 1000) if t <= users]
    table = trade_off(users, chosen, epsilon, delta, dimension, signal)
    if as_json:
        typer.echo(json.dumps(table))
        return
    m = balanced_batch(users, epsilon, dimension)
    typer.echo(f"{users} users, epsilon {epsilon:g}, delta {delta:g}, d = {dimension}")
    typer.echo(f"balanced batch size (He & Zhou, Theorem 2): m = {m:.0f}, T = {users / m:.0f}\n")
    typer.echo(plan_table(table))


@app.command()
def audit(
    recipe: Annotated[
        Path, typer.Argument(help="a YAML recipe, or a run's folder: its card then says the result")
    ],
    overrides: Overrides = None,
    canaries: Annotated[int, typer.Option(help="canary users; more give a higher bound")] = 1000,
    space: Annotated[
        relations.Space,
        typer.Option(help="gradient takes seconds; prompt attacks the recipe's own model"),
    ] = "gradient",
    output_dir: Annotated[str | None, typer.Option(help="the audit's own folder")] = None,
    as_json: AsJson = False,
) -> None:
    """Attack what a recipe or a run claims, with canary users of its own: a lower bound on ε.

    The private data are not read, and no run is charged. Exit status 1: claim refuted.
    """
    from dprlhf.audit.one_run import audit as attack
    from dprlhf.audit.one_run import audit_folder, audit_run
    from dprlhf.privacy.gaussian import upwards
    from dprlhf.recipe import load_recipe

    if recipe.is_dir() and overrides:
        raise DprlhfError("a run is audited as it was made: leave the overrides out")
    folder = output_dir or audit_folder()
    options: dict[str, Any] = {"canaries": canaries, "space": space, "quiet": as_json}
    if recipe.is_dir():
        found = audit_run(recipe, folder, **options)
    else:
        found = attack(load_recipe(recipe, overrides or ()), folder, **options)
    if as_json:
        typer.echo((Path(folder) / "audit.json").read_text())
    else:
        typer.echo(
            f"claimed: epsilon <= {upwards(found.epsilon, 4)} at delta {found.delta:.3g}\n"
            f"audited: epsilon >= {found.bound:.4g} at confidence {found.confidence:.0%}"
            f" ({found.right} of {found.guesses} guesses right, {found.canaries} canaries,"
            f" {found.space} space)"
        )
    if not found.holds:
        typer.echo("the claim is refuted: please report this", err=True)
        raise typer.Exit(1)


@privacy.command("epsilon")
def privacy_epsilon(
    users: Users,
    rounds: Rounds,
    delta: Delta,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="z = noise std / clip norm")
    ] = None,
    round_epsilon: Annotated[
        float | None,
        typer.Option(help="in place of z: ε of a pure round, as the exponential mechanism's"),
    ] = None,
    partition: Partition = "random-allocation",
    adjacency: Adjacency = None,
    participations: Participations = 1,
    releases_per_round: Releases = 1,
    as_json: AsJson = False,
) -> None:
    """Compute ε, an upper bound, from the noise multiplier or from a pure round's ε."""
    from dprlhf.privacy import pure
    from dprlhf.privacy.gaussian import upwards
    from dprlhf.privacy.plan import default_adjacency, json_ready, make_plan

    if (noise_multiplier is None) == (round_epsilon is None):
        raise DprlhfError("give one of --noise-multiplier and --round-epsilon")
    if round_epsilon is not None:
        if (participations, releases_per_round) != (1, 1):
            raise DprlhfError(
                "--round-epsilon is for users with one round and rounds with one answer"
            )
        neighbours = adjacency or default_adjacency(partition)
        mechanism = pure.Mechanism(round_epsilon, rounds, partition, neighbours)
        guarantee = pure.epsilon(mechanism, delta)
    elif noise_multiplier is not None and noise_multiplier > 0:
        guarantee = make_plan(
            users=users,
            rounds=rounds,
            delta=delta,
            noise_multiplier=noise_multiplier,
            partition=partition,
            adjacency=adjacency,
            participations=participations,
            releases_per_round=releases_per_round,
        ).guarantee
    else:
        raise DprlhfError(f"--noise-multiplier must be above 0, not {noise_multiplier}")
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
    epsilon: Annotated[float, typer.Option(help="ε to keep within")],
    delta: Delta,
    partition: Partition = "random-allocation",
    adjacency: Adjacency = None,
    participations: Participations = 1,
    releases_per_round: Releases = 1,
    as_json: AsJson = False,
) -> None:
    """Find the smallest noise multiplier that keeps within ε."""
    from dprlhf.privacy.gaussian import upwards
    from dprlhf.privacy.plan import make_plan

    if not 0 < epsilon < math.inf:
        raise DprlhfError(f"--epsilon must be a positive number, not {epsilon}")
    made = make_plan(
        users=users,
        rounds=rounds,
        delta=delta,
        epsilon=epsilon,
        partition=partition,
        adjacency=adjacency,
        participations=participations,
        releases_per_round=releases_per_round,
    )
    _warn_delta(delta, users)
    answer = {"noise_multiplier": made.noise_multiplier, "epsilon": made.guarantee.epsilon}
    z, cost = upwards(made.noise_multiplier, 6), upwards(made.guarantee.epsilon, 6)
    text = f"noise multiplier = {z} (epsilon {cost})"
    typer.echo(json.dumps(answer) if as_json else text)


@privacy.command("total")
def privacy_total(
    runs: Annotated[list[Path], typer.Argument(help="run folders")],
    disjoint: Annotated[
        bool, typer.Option(help="no two of these runs have a user in common; you state it")
    ] = False,
    delta: Annotated[
        float | None, typer.Option(help="δ of the total; the largest of the runs' by default")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """State what several runs cost together: stages of a pipeline, or runs on the same users."""
    from dprlhf.privacy.gaussian import upwards
    from dprlhf.privacy.plan import json_ready
    from dprlhf.runs.earlier import total_of_runs

    records, cost = total_of_runs(runs, disjoint=disjoint, delta=delta)
    if as_json:
        answer = {
            "epsilon": json_ready(cost.epsilon),
            "epsilon_lower": json_ready(cost.epsilon_lower),
            "delta": cost.delta,
            "accountant": cost.accountant,
            "runs": [record.name for record in records],
        }
        typer.echo(json.dumps(answer))
        return
    for record in records:
        typer.echo(f"{record.name:<24}{record.stage:<8}{json.dumps(record.mechanism)}")
    shown = upwards(cost.epsilon, 6)
    typer.echo(f"total: epsilon = {shown} at delta = {cost.delta:g} ({cost.accountant})")


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


@bench.callback()
def _bench() -> None:
    """The papers' tables, measured."""


@bench.command("control")
def bench_control(
    table: Annotated[str, typer.Option(help="hz, rio, riverswim or all")] = "all",
    seeds: Annotated[int, typer.Option(help="of each row")] = 10,
    jobs: Annotated[int, typer.Option(help="processes")] = 2,
    only: Annotated[str, typer.Option(help="rows whose name holds this")] = "",
    recipes: Annotated[Path, typer.Option(help="the recipes' folder")] = Path("recipes/control"),
    cache: Annotated[Path, typer.Option(help="finished runs; a second call resumes")] = Path(
        "runs/control"
    ),
    out: Annotated[Path, typer.Option(help="where results/ and images/ are")] = Path("docs"),
    write_only: Annotated[
        bool, typer.Option("--write-only", help="run nothing; write what is finished")
    ] = False,
) -> None:
    """Run the control tables and write results, a table beside the papers' and plots."""
    from dprlhf.papers.control.results import write
    from dprlhf.papers.control.tables import TABLES, read_table, run_table

    if table != "all" and table not in TABLES:
        raise DprlhfError(f"table '{table}' is unknown: use all, {', '.join(TABLES)}")
    if not recipes.is_dir():
        raise DprlhfError(
            f"{recipes}: no such folder: run this in a clone of the repository, or give --recipes"
        )
    names = list(TABLES) if table == "all" else [table]
    if not write_only:
        for name in names:
            rows = [row.name for row in TABLES[name]() if only in row.name]
            if rows:
                run_table(name, seeds=seeds, jobs=jobs, recipes=recipes, cache=cache, only=only)
    found = {name: read_table(name, seeds, cache, recipes) for name in TABLES}
    command = f"dprlhf bench control --table {table} --seeds {seeds}"
    (out / "results").mkdir(parents=True, exist_ok=True)
    typer.echo(write(found, out, command, seeds))


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


def _warn_delta(delta: float, users: int) -> None:
    from dprlhf.privacy.plan import delta_warning

    warning = delta_warning(delta, users)
    if warning:
        print(f"dprlhf: warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    main()
