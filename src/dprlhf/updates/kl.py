"""The KL penalty in the reward, which keeps the policy close to the reference policy.

β (log π_t(y|x) − log π_ref(y|x)) is subtracted from the response's own reward, as in RLHF (arXiv
2203.02155) and TRL's RLOO. Its mean over y ~ π_t is β KL(π_t ‖ π_ref), and the policy gradient of
the penalised reward is that of E r − β KL: the derivative of the log-ratio itself has mean zero.
π_ref is the network with its adapter off. With top-k, top-p or min-p the log-ratio is that of the
policies before they are cut, which is finite at every token. The penalty is a function of one
user's own rows, so it changes no sensitivity; GRPO, too, has it in the reward and not in its loss.
"""

from __future__ import annotations

import numpy as np

from dprlhf import recipe
from dprlhf.rewards import Scores
from dprlhf.rollout.logprobs import Array
from dprlhf.updates.round import PrivateRound


def subtract_kl(round_: PrivateRound, spec: recipe.KL, batch_size: int) -> None:
    """Subtract the penalty from the rewards that the update sees, not from those of telemetry."""
    # Scores are clipped to [−R, R] before, so that the penalty counts even then.
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
