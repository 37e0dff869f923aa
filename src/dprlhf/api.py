"""Train, resume, generate: the three calls behind the command line and the Python API."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dprlhf.data.in_memory import Reward, Sources, recipe_of
from dprlhf.data.public import in_memory_prompts, prompts_in
from dprlhf.errors import DprlhfError
from dprlhf.recipe import Recipe, load_any_recipe
from dprlhf.rollout import sample
from dprlhf.runs.card import audit_of, model_card, privacy_card
from dprlhf.runs.checkpoint import last_checkpoint
from dprlhf.runs.folder import RunFolder, replaced_folder, time_stamp, write_json
from dprlhf.training.build import Callback, hush_libraries, load, prepared
from dprlhf.training.evaluate import Evaluated, estimate
from dprlhf.training.processes import Processes
from dprlhf.training.timing import seconds_a_response, seconds_a_round
from dprlhf.training.trainer import Result, Run, evaluate_policy, run_rounds


def train(
    recipe: Recipe | str | Path | None = None,
    *,
    prompts: Sequence[Any] | Any | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    evaluation_prompts: Sequence[Any] | Any | None = None,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **flat: Any,
) -> Result:
    """Tune a policy on private prompts.

    Args:
        recipe: a :class:`~dprlhf.recipe.Recipe`, a YAML file, or None to build one from ``flat``.
        prompts: private prompts in memory: a list of texts, conversations or rows, a generator, or
            a ``datasets.Dataset`` or ``IterableDataset``. Replaces the recipe's data.
        reward: a callable or several with TRL's signature. Replaces the recipe's rewards.
        evaluation_prompts: public prompts in memory, for the reward before and after.
        overrides: ``section.key=value`` texts, applied to a YAML file.
        output_dir: the run folder; must not exist.
        callbacks: called after every round with its public and released metrics: functions, or
            ``transformers.TrainerCallback`` objects (:mod:`dprlhf.training.callbacks`).
        quiet: no progress bars.
        **flat: without a recipe, settings by name: ``model``, ``epsilon``, ``rounds``, or any key
            with ``__`` for the dot (``update__clip_norm=0.5``).

    Returns:
        The tuned policy, the guarantee and the public rewards.

    Raises:
        DprlhfError: a setting, the data or a reward is wrong; the message names it.
    """
    sources = Sources(prompts, reward, evaluation_prompts)
    recipe = recipe_of(recipe, overrides, flat, sources)
    if output_dir is not None:
        recipe = recipe.model_copy(update={"output_dir": str(output_dir)})
    # One name for all processes of a launch, whose clocks may stand on either side of a second.
    name = Processes.connect().from_main(recipe.output_dir or f"runs/{time_stamp()}")
    folder = RunFolder(Path(name))
    with prepared(recipe, folder, sources, create=True, callbacks=callbacks, quiet=quiet) as run:
        return _run(run)


def resume(
    folder: str | Path,
    *,
    prompts: Sequence[Any] | Any | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    evaluation_prompts: Sequence[Any] | Any | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> Result:
    """Continue a run that was interrupted, with the same recipe and the same users.

    Rounds that were charged stay spent: their users are never drawn again.

    Raises:
        DprlhfError: the folder is no run, was altered, or its data or recipe changed.
    """
    run_folder = RunFolder(Path(folder))
    recipe = _recipe_in(run_folder)
    sources = Sources(prompts, reward, evaluation_prompts)
    with prepared(
        recipe, run_folder, sources, create=False, callbacks=callbacks, quiet=quiet
    ) as run:
        return _run(run)


def generate(
    folder: str | Path,
    prompts: Sequence[Any] | Path,
    seed: int = 0,
    *,
    max_new_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """Continue prompts with the base and with the tuned policy of a run.

    Args:
        folder: the run folder.
        prompts: texts or conversations; or a file of them, one a line, or a ``.csv``, ``.json``,
            ``.jsonl`` or ``.parquet`` with the recipe's ``data.prompt_column``.
        seed: of the sampling.
        max_new_tokens: of a continuation; None is the recipe's ``rollout.max_new_tokens``.

    Returns:
        For each prompt: ``prompt``, ``base`` and ``tuned``.

    Raises:
        DprlhfError: there is no policy or no such file, or the continuations do not fit the model.
    """
    hush_libraries()
    run_folder = RunFolder(Path(folder))
    recipe = _recipe_in(run_folder)
    if max_new_tokens is not None:
        if max_new_tokens < 1:
            raise DprlhfError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        rollout = recipe.rollout.model_copy(update={"max_new_tokens": max_new_tokens})
        recipe = recipe.model_copy(update={"rollout": rollout})
    if isinstance(prompts, Path):
        prompts = prompts_in(prompts, recipe.data.prompt_column)
    checkpoint = last_checkpoint(run_folder)
    if checkpoint is None:
        raise DprlhfError(f"{folder}: no policy yet; finish the run with: dprlhf resume {folder}")
    policy = load(recipe)
    policy.load_state(load_file(checkpoint / "policy.safetensors"))
    asked = in_memory_prompts(prompts)
    one = recipe.rollout.model_copy(
        update={"responses": 1, "base_policy": "on-policy", "backend": "transformers"}
    )
    texts = {}
    for name in ("base", "tuned"):
        with policy.base() if name == "base" else contextlib.nullcontext():
            texts[name] = sample(
                policy,
                asked,
                one,
                key=bytes(32),
                context=("generate", seed),
                max_prompt_tokens=recipe.data.max_prompt_tokens,
            ).texts
    return [
        {"prompt": p, "base": b, "tuned": t}
        for p, b, t in zip(prompts, texts["base"], texts["tuned"], strict=True)
    ]


def _recipe_in(folder: RunFolder) -> Recipe:
    folder.require()
    recipe = load_any_recipe(folder.recipe)
    if not isinstance(recipe, Recipe):
        raise DprlhfError(
            f"{folder.path}: a run of stage {recipe.stage}; continue it with dprlhf resume, and"
            f" load what it made from {folder.model}"
        )
    return recipe


def _run(run: Run) -> Result:
    card = privacy_card(run.recipe, run.plan, run.policy.dimension, run.key, run.earlier)
    card |= audit_of(run.folder)
    if run.processes.main:
        write_json(run.folder.privacy, card)
        for warning in run.spread.warnings:
            print(f"dprlhf: warning: {warning}", file=sys.stderr)
    before = _evaluate(run, "evaluation before", base=True)
    public, timing = run.public_prompts, {}
    if public is not None:
        timing = seconds_a_response(run.policy, run.scorer, public, run.recipe)
        of_round = seconds_a_round(run.recipe, run.plan, timing)
        run.progress.expect(of_round / run.processes.count)
    try:
        run_rounds(run)
    finally:
        run.progress.close()
    after = _evaluate(run, "evaluation after", base=False)
    samples = _samples(before, after)
    if run.processes.main:
        with replaced_folder(run.folder.policy) as fresh:
            run.policy.save(fresh)
            (fresh / "README.md").write_text(model_card(run.recipe, card))
        if after is not None:
            write_json(run.folder.samples, samples)
            write_json(run.folder.timing, timing)
    run.processes.wait()
    return Result(
        folder=run.folder,
        plan=run.plan,
        before=before.estimate if before else None,
        after=after.estimate if after else None,
        difference=estimate(after.rewards - before.rewards) if before and after else None,
        samples=samples,
        policy=run.policy,
    )


def _evaluate(run: Run, description: str, *, base: bool) -> Evaluated | None:
    if run.public_prompts is None:
        return None
    return evaluate_policy(run, description, base=base)


def _samples(before: Evaluated | None, after: Evaluated | None) -> list[dict[str, Any]]:
    if before is None or after is None:
        return []
    return [
        {
            "prompt": prompt,
            "before": old,
            "reward_before": float(r_old),
            "after": new,
            "reward_after": float(r_new),
        }
        for prompt, old, r_old, new, r_new in zip(
            after.responses.prompts.prompts,
            before.responses.texts,
            before.rewards,
            after.responses.texts,
            after.rewards,
            strict=True,
        )
    ]


__all__ = ["generate", "resume", "train"]
