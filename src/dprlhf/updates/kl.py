"""The KL penalty in the reward, which keeps the policy close to the reference policy.

β (log π_t(y|x) − log π_ref(y|x)) is subtracted from the response's own reward, as in RLHF (arXiv
2203.02155) and TRL's RLOO. Its mean over y ~ π_t is β KL(π_t ‖ π_ref), and where π_t and the reward
are not clipped, the policy gradient of the penalised reward is the gradient of E r − β KL: the
derivative of the log-ratio itself has mean zero. π_ref is the network with its adapter off, both
policies at the temperature of sampling. With top-k, top-p or min-p the log-ratio is that of the
policies before they are cut, which is finite at every token; the penalty's mean is then a KL
divergence of the whole distributions, weighted by the sampled ones.

The penalty is a function of one user's own rows, so it changes no sensitivity. Any update sees it
as part of the reward: GRPO, too, has it there and not in its loss (arXiv 2402.03300, equation 3),
so ``scale_rewards`` scales it with the reward.
"""

from __future__ import annotations

import numpy as np

from dprlhf import recipe
from dprlhf.rewards import Scores
from dprlhf.rollout.logprobs import Array
from dprlhf.updates.round import PrivateRound


def subtract_kl(round_: PrivateRound, spec: recipe.KL, batch_size: int) -> None:
    """Subtract the penalty from the rewards that the update sees, not from those of telemetry.

    The score is clipped to [−R, R] before, so that the penalty counts even where the score was
    clipped; the difference is clipped to [−R, R] again.
    """
    if not spec.beta:
        return
    bound = round_.telemetry.reward_range

    def less_penalty(scores: Scores, log_ratio: Array) -> Scores:
        values = penalised(scores.values, log_ratio, spec.beta, bound)
        returns = scores.returns
        if returns is not None:
            each = [penalised(of_turn, log_ratio, spec.beta, bound) for of_turn in returns.T]
            returns = np.stack(each, 1)
        return Scores(values, scores.valid, scores.failures, returns=returns)

    round_.scores = round_.scores.map(less_penalty, round_.log_ratio(batch_size, every_row=True))


def penalised(rewards: Array, log_ratio: Array, beta: float, bound: float) -> Array:
    """Return the rewards less the penalty, clipped to [−bound, bound]."""
    clipped: Array = (rewards - beta * log_ratio.sum(1)).clip(-bound, bound)
    return clipped
