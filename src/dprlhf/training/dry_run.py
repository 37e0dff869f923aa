"""``--dry-run``: the plan and the cost of a recipe of any stage; nothing is charged or written."""

from __future__ import annotations

import sys
from typing import Any

import torch

from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.privacy.gaussian import upwards
from dprlhf.recipe import AnyRecipe, Recipe, experimental, without_effect
from dprlhf.recipe.supervised import StageRecipe
from dprlhf.runs.card import released_dimension
from dprlhf.runs.earlier import total
from dprlhf.training.build import load_parts, say_what_is_left_out
from dprlhf.training.processes import Processes
from dprlhf.training.reinforcement import Reinforcement
from dprlhf.training.run import PreparedRun, Stage
from dprlhf.training.supervised import Supervised
from dprlhf.training.timing import (
    in_words,
    seconds_a_response,
    seconds_a_round,
    seconds_a_row,
)
from dprlhf.training.trainer import rehearse_end


def dry_run(recipe: Recipe, sources: InMemoryInputs | None = None) -> dict[str, Any]:
    """Load and check everything that a run would, and time one micro-batch of public prompts.

    No folder is made, no user's prompt is drawn and nothing is charged. The estimated time leaves
    out the KL penalty, which is a forward pass, and evaluation during the run.
    """
    stage, prepared = _loaded(recipe, sources or InMemoryInputs(None, None, None))
    assert isinstance(stage, Reinforcement)
    recipe, plan, policy = stage.recipe, prepared.plan, prepared.policy
    public = stage.known
    for _ in range(2):  # the first pass warms up
        phases = seconds_a_response(policy, stage.scorer, public, recipe, keep=stage.keep)
    spread, cut = stage.spread, None  # cut: the share of PUBLIC prompts longer than private may be
    if stage.public is not None:
        whole = policy.encode(stage.public.prompts, sys.maxsize, stage.public.for_template)
        cut = sum(len(tokens) > recipe.data.max_prompt_tokens for tokens in whole) / len(whole)
    seconds = plan.rounds * seconds_a_round(stage.recipe, plan, phases, prepared.guides)
    if stage.public is not None:
        seconds += 2 * len(stage.public) * (phases["rollout"] + phases["reward"])
    return {
        **_terms(stage, prepared),
        "responses_a_round": plan.expected_batch_size * stage.shapes.rows * stage.shapes.prompts,
        "max_prompt_tokens": recipe.data.max_prompt_tokens,
        "max_new_tokens": recipe.rollout.max_new_tokens,
        "public_prompts_cut": cut,
        "reward": {
            "mean": spread.mean,
            "spread": spread.std,
            "clipped": spread.clipped,
            "responses": spread.responses,
            "stand_ins": stage.public is None,
        },
        "seconds_a_response": phases,
        "estimated_seconds": seconds / prepared.processes.count,
    }


def dry_run_stage(
    recipe: StageRecipe, data: Any = None, evaluation_data: Any = None
) -> dict[str, Any]:
    """Load and check everything that a supervised stage would, and time some public rows."""
    sources = InMemoryInputs(data, None, evaluation_data)
    stage, prepared = _loaded(recipe, sources)
    assert isinstance(stage, Supervised)
    recipe, plan, public = stage.recipe, prepared.plan, stage.public
    seconds = estimated = None
    if public is not None:
        size = recipe.update.batch_size
        some = public.first(size)
        seconds_a_row(prepared.policy, stage.task, some, size, plan.clip_norm)  # warms up
        seconds = seconds_a_row(prepared.policy, stage.task, some, size, plan.clip_norm)
        of_rounds = plan.rounds * (stage.seconds_a_round(prepared, seconds) or 0.0)
        # Evaluation before and after: a forward pass, about a third of a step.
        estimated = of_rounds / prepared.processes.count + seconds * 2 * len(public) / 3
    return {
        **_terms(stage, prepared),
        "rows_kept": recipe.data.kept,
        "seconds_a_row": seconds,
        "estimated_seconds": estimated,
    }


def _loaded(recipe: AnyRecipe, sources: InMemoryInputs) -> tuple[Stage, PreparedRun]:
    """Load and check everything as a run does, up to what it does at its end."""
    processes = Processes.connect()
    stage, prepared = load_parts(recipe, sources, processes, quiet=True)
    processes.on_main(lambda: rehearse_end(stage, prepared, None))
    processes.on_main(lambda: say_what_is_left_out(stage, prepared))
    return stage, prepared


def _terms(stage: Stage, prepared: PreparedRun) -> dict[str, Any]:
    recipe, plan, policy = stage.recipe, prepared.plan, prepared.policy
    dimension = released_dimension(recipe, policy.dimension)
    return {
        **plan.terms(),
        **({"total_epsilon": total(plan, prepared.earlier).epsilon} if prepared.earlier else {}),
        "users_a_round": plan.expected_batch_size,
        "dimension": policy.dimension,
        "noise_to_clip_ratio": plan.noise_to_clip_ratio(dimension),
        "processes": prepared.processes.count,
        "device": str(policy.device),
        "memory_bytes": _memory(policy.device),
        "experimental": list(experimental(recipe)),
        "warnings": [*without_effect(recipe), *plan.warnings(dimension), *stage.warnings],
    }


def explain(plan: dict[str, Any]) -> str:
    """Return the plan of :func:`dry_run` or :func:`dry_run_stage` as lines of text."""
    seconds, gib = plan["estimated_seconds"], plan["memory_bytes"] / 2**30
    if seconds is None:
        duration = "unknown: there are no public rows to time (evaluation)"
    else:
        duration = f"about {in_words(seconds)}"
    epsilon = plan["epsilon"]
    promise = (
        "none: no noise is added (a baseline)"
        if epsilon == "infinity"
        else f"epsilon = {upwards(epsilon, 4)} at delta = {plan['delta']:g} ({plan['adjacency']})"
    )
    rows = [("guarantee", promise)]
    if "total_epsilon" in plan:
        whole = upwards(plan["total_epsilon"], 4)
        rows.append(("in total", f"epsilon = {whole} with what came before"))
    rows += [
        ("users", f"{plan['users']:,}, partition {plan['partition']}"),
        ("rounds", f"{plan['rounds']}, with {plan['users_a_round']:,.1f} users expected in each"),
    ]
    if "reward" in plan:
        rows += _tokens_and_reward(plan)
    rows += [
        ("trained parameters", f"d = {plan['dimension']:,}"),
        ("clip norm", f"{plan['clip_norm']}"),
        ("noise multiplier", f"{plan['noise_multiplier']:.4g}"),
        ("noise-to-clip ratio", f"{plan['noise_to_clip_ratio']:.3g}"),
        ("machine", f"{plan['processes']} process(es), {plan['device']}"),
    ]
    if phases := plan.get("seconds_a_response"):
        rows.append(("time for a response", ", ".join(f"{k} {_ms(s)}" for k, s in phases.items())))
    if "rows_kept" in plan:
        rows.append(("rows", plan["rows_kept"]))
    if seconds_a_row := plan.get("seconds_a_row"):
        rows.append(("time for a row", _ms(seconds_a_row)))
    rows += [
        ("estimated time", duration),
        ("memory", f"{gib:.3g} GiB at the largest, with one micro-batch"),
        *(("experimental", feature) for feature in plan["experimental"]),
        *(("warning", warning) for warning in plan["warnings"]),
    ]
    return "\n".join(f"{name:<21}{value}" for name, value in rows)


def _tokens_and_reward(plan: dict[str, Any]) -> list[tuple[str, str]]:
    reward, cut = plan["reward"], plan["public_prompts_cut"]
    cut = "" if cut is None else f" ({cut:.0%} of the public prompts are longer, and cut)"
    prompts = "stand-in" if reward["stand_ins"] else "public"
    return [
        ("responses", f"at most {plan['responses_a_round']:,.1f} expected in a round"),
        ("tokens of a prompt", f"at most {plan['max_prompt_tokens']}{cut}"),
        ("tokens of a response", f"at most {plan['max_new_tokens']}"),
        (
            "reward",
            f"mean {reward['mean']:.3g}, standard deviation {reward['spread']:.3g},"
            f" {reward['clipped']:.0%} clipped: {reward['responses']} responses to {prompts}"
            " prompts",
        ),
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kibibytes on Linux
