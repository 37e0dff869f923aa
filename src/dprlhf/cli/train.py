"""The commands that train and print results: ``train``, supervised stages, ``resume``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dprlhf.errors import DprlhfError, one_line


def show(result: Any) -> None:
    """Print a finished run: some continuations, the guarantee, the reward before and after."""
    from dprlhf.runs.card import guarantee_sentence

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
    from dprlhf.recipe.sections import measure_label

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
    from dprlhf.runs.card import guarantee_sentence

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


Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to the recipe: section.key=value, any number of them."),
]
OutputDir = Annotated[
    str | None,
    typer.Option("--output-dir", "--output_dir", help="The new run folder; it must not exist yet."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan; spend no privacy and write nothing.")
]
PlanAsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: the plan as JSON.")]


def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.")],
    overrides: Overrides = None,
    output_dir: OutputDir = None,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
) -> None:
    """Fine-tune a language model on private prompts, by reinforcement learning.

    Flags named as in TRL (--learning_rate, --num_generations, ...) work beside section.key=value.

    Experimental (no measurement shows their use yet): rollout.backend=vllm,
    rollout.agent, the adapters peft and full.
    """
    _check_json(as_json, dry_run)
    changes = list(overrides or ())
    if any(text.startswith("--") for text in changes):
        from dprlhf.recipe.trl_names import overrides_of

        changes = overrides_of(changes)
    if dry_run:
        from dprlhf.recipe import load_recipe
        from dprlhf.training.dry_run import dry_run as look_ahead

        _show_plan(look_ahead(load_recipe(recipe, changes)), as_json)
        return
    from dprlhf.api import train as run

    with _interruptible():
        show(run(recipe, overrides=changes, output_dir=output_dir))


def _of_stage(stage: str, about: str) -> Callable[..., None]:
    """Return the command of a supervised stage, with its help."""

    def command(
        recipe: Annotated[Path, typer.Argument(help="A YAML recipe of this stage.")],
        overrides: Overrides = None,
        output_dir: OutputDir = None,
        dry_run: DryRun = False,
        as_json: PlanAsJson = False,
    ) -> None:
        from dprlhf.stages import load_stage_recipe, train_stage

        _check_json(as_json, dry_run)
        loaded = load_stage_recipe(recipe, overrides or (), stage=stage)
        if loaded.stage != stage:
            raise DprlhfError(
                f"{recipe}: a recipe of stage {loaded.stage}: run it with dprlhf {loaded.stage}"
            )
        if dry_run:
            from dprlhf.training.dry_run import dry_run_stage

            _show_plan(dry_run_stage(loaded), as_json)
            return
        with _interruptible():
            show_stage(train_stage(loaded, output_dir=output_dir))

    command.__doc__ = about
    return command


sft = _of_stage("sft", "Fine-tune a language model on private documents, before `dprlhf train`.")
reward = _of_stage("reward", "Train a reward model on private preference pairs or labels.")
dpo = _of_stage("dpo", "Fine-tune a language model on private preference pairs, by DPO.")
feedback = _of_stage(
    "feedback",
    "Fine-tune a language model on logged feedback: what was shown, and what users did with it.",
)


def resume(run: Annotated[Path, typer.Argument(help="The folder of the run.")]) -> None:
    """Continue a run that stopped, of any stage. A round that was charged never runs again."""
    from dprlhf.api import resume as continue_run
    from dprlhf.recipe import Recipe, load_any_recipe
    from dprlhf.runs.folder import RunFolder

    kept = RunFolder(run).recipe
    with _interruptible():
        if kept.is_file() and not isinstance(load_any_recipe(kept), Recipe):
            from dprlhf.stages import resume_stage

            show_stage(resume_stage(run))
        else:
            show(continue_run(run))


def _check_json(as_json: bool, dry_run: bool) -> None:
    if as_json and not dry_run:
        raise DprlhfError("--json prints the plan of --dry-run, and this would be a run")


def _show_plan(plan: dict[str, Any], as_json: bool) -> None:
    from dprlhf.training.dry_run import explain

    if not int(os.environ.get("RANK", "0")):
        typer.echo(json.dumps(plan) if as_json else explain(plan))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    # Inside the command: typer turns a KeyboardInterrupt that reaches it into a bare "Aborted!".
    try:
        yield
    except KeyboardInterrupt as interrupt:
        why = str(interrupt) or "interrupted while starting: nothing was spent"
        print(f"\ndprlhf: {why}", file=sys.stderr)
        raise typer.Exit(130) from None
