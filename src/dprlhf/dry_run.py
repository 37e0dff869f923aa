"""``dprlhf train --dry-run``: what a recipe would do and cost; nothing is charged or written."""

from __future__ import annotations

from typing import Any

import torch

from dprlhf.plan import delta_warning
from dprlhf.previous import total
from dprlhf.privacy.gaussian import upwards
from dprlhf.processes import Processes
from dprlhf.recipe import Recipe
from dprlhf.rewards import Scorer
from dprlhf.setup import Parts, Sources, assemble, neutral_prompts
from dprlhf.timing import seconds_a_response


def dry_run(recipe: Recipe, sources: Sources | None = None) -> dict[str, Any]:
    """Load everything that a run would load, and time one micro-batch of public prompts.

    No folder is made, no user's prompt is drawn and nothing is charged.

    Returns:
        The plan, JSON-ready: what is released and at which ε, the noise, the memory of the timed
        micro-batch (bytes), and the estimated time (seconds). The estimate leaves out the KL
        penalty and the importance ratio, a forward pass each, and evaluation during the run.

    Raises:
        DprlhfError: as the run would.
    """
    processes = Processes.connect()
    parts = assemble(recipe, sources or Sources(None, None, None), processes, quiet=True)
    recipe, plan, policy = parts.recipe, parts.plan, parts.policy
    public = parts.public_prompts or neutral_prompts()
    scorer = Scorer(parts.rewards, recipe.reward_range)
    seconds_a_response(policy, scorer, public, recipe)  # the first pass also warms up
    phases = seconds_a_response(policy, scorer, public, recipe)
    return {
        **plan.terms(),
        **({"total_epsilon": total(plan, parts.earlier).epsilon} if parts.earlier.records else {}),
        "users_a_round": plan.divisor,
        "responses_a_round": plan.divisor * recipe.rollout.responses,
        "dimension": policy.dimension,
        "noise_to_clip_ratio": plan.noise_to_clip_ratio(policy.dimension),
        "processes": processes.count,
        "device": str(policy.device),
        "seconds_a_response": phases,
        "estimated_seconds": _seconds(parts, phases) / processes.count,
        "memory_bytes": _memory(policy.device),
        "warnings": [w for w in [delta_warning(plan.guarantee.delta, plan.users)] if w],
    }


def explain(plan: dict[str, Any]) -> str:
    """Return the plan of :func:`dry_run` as lines of text."""
    seconds, gib = plan["estimated_seconds"], plan["memory_bytes"] / 2**30
    duration = f"{seconds:.2g} seconds" if seconds < 100 else f"{seconds / 60:,.0f} minutes"
    epsilon = plan["epsilon"]
    promise = (
        "none: no noise is added (a baseline)"
        if epsilon == "infinity"
        else f"epsilon = {upwards(epsilon, 4)} at delta = {plan['delta']:g} ({plan['adjacency']})"
    )
    phases = ", ".join(f"{k} {1000 * s:.3g} ms" for k, s in plan["seconds_a_response"].items())
    rows = [
        ("guarantee", promise),
        *(
            [("with earlier runs", f"epsilon = {upwards(plan['total_epsilon'], 4)} in total")]
            if "total_epsilon" in plan
            else []
        ),
        ("users", f"{plan['users']:,}, partition {plan['partition']}"),
        ("rounds", f"{plan['rounds']}, with {plan['users_a_round']:.1f} users expected in each"),
        ("responses", f"{plan['responses_a_round']:.1f} expected in a round"),
        ("trained parameters", f"d = {plan['dimension']:,}"),
        ("clip norm", f"{plan['clip_norm']}"),
        ("noise multiplier", f"{plan['noise_multiplier']:.4g}"),
        ("noise-to-clip ratio", f"{plan['noise_to_clip_ratio']:.3g}"),
        ("machine", f"{plan['processes']} process(es), {plan['device']}"),
        ("time for a response", phases),
        ("estimated time", f"about {duration}"),
        ("memory", f"{gib:.3g} GiB at the largest, with one micro-batch"),
        *(("warning", w) for w in plan["warnings"]),
    ]
    return "\n".join(f"{name:<21}{value}" for name, value in rows)


def _seconds(parts: Parts, phases: dict[str, float]) -> float:
    recipe, plan = parts.recipe, parts.plan
    passes = plan.releases_per_round * getattr(recipe.update, "epochs", 1)
    of_response = phases["rollout"] + phases["reward"] + passes * phases["update"]
    responses = plan.rounds * plan.divisor * recipe.rollout.responses
    evaluated = 2 * len(parts.public_prompts) if parts.public_prompts is not None else 0
    return responses * of_response + evaluated * (phases["rollout"] + phases["reward"])


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kibibytes on Linux
