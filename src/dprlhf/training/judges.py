"""The judges that a recipe names, which score public responses beside the reward."""

from __future__ import annotations

import sys

import torch

from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import Recipe, Reward
from dprlhf.rewards import Scorer, load_reward
from dprlhf.rewards.private import score_responses
from dprlhf.rollout import public_sampling_settings, sample

_UNCLIPPED = sys.float_info.max
_TRIED = 4
"""Number of public responses on which each judge is tried before the first round."""


def judge_scorers(
    recipe: Recipe, policy: CausalLMPolicy, public: Prompts | None, *, device: str | torch.device
) -> dict[str, Scorer]:
    """Load the judges of ``evaluation.judges``, and try each on a few public responses.

    During the run a judge that fails costs no more than its score: the run is not stopped.

    Args:
        policy: The policy, which samples the responses to try them on.

    Raises:
        DprlhfError: A judge cannot be loaded, or scores none of the responses.
    """
    specs = recipe.evaluation.judges if recipe.evaluation is not None else {}
    if not specs or public is None:
        return {}
    judges = {
        name: Scorer([load_reward(Reward(function=function), device=device)], _UNCLIPPED)
        for name, function in specs.items()
    }
    some = public.first(_TRIED)
    responses = sample(
        policy,
        some,
        public_sampling_settings(recipe.rollout, len(some), 1),
        key=bytes(32),
        context=("evaluation", recipe.seed),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
    )
    for name, judge in judges.items():
        scores = score_responses(judge, responses)
        if not scores.valid.any():
            kinds = ", ".join(scores.failures) or "no score"
            raise DprlhfError(
                f"evaluation.judges.{name}: it scores none of {len(scores.valid)} public responses"
                f" ({kinds}); try it with dprlhf reward-check"
            )
    return judges
