"""The KL penalty: what it costs a response to be likelier under π_t than under the reference.

β (log π_t(y|x) − log π_ref(y|x)) is taken off the response's own reward, as in RLHF (arXiv
2203.02155) and TRL's RLOO. Its mean over y ~ π_t is β KL(π_t ‖ π_ref), and where π_t and the reward
are not clipped, the policy gradient of the penalised reward is the gradient of E r − β KL: the
derivative of the log-ratio itself has mean zero. π_ref is the network with its adapter off, both
policies at the temperature of sampling.

The penalty is a function of one user's own rows, so it changes no sensitivity. Any update sees it
as part of the reward: GRPO, too, has it there and not in its loss (arXiv 2402.03300, equation 3),
so ``scale_rewards`` scales it with the reward.
"""

from __future__ import annotations

from dprlhf import recipe
from dprlhf.boundary import Private, open_private
from dprlhf.rewards import Scores
from dprlhf.rollout.logprobs import Array, log_ratio_to_base
from dprlhf.updates.round import PrivateRound


def subtract_kl(round_: PrivateRound, spec: recipe.KL, batch_size: int) -> None:
    """Take the penalty off the rewards that the update will see; telemetry keeps them whole.

    The score lies in [−R, R] already, so that the penalty counts where it is clipped; the
    difference is clipped to [−R, R] again. With ``level: token`` the rewards become
    ``[rows, response]``: see :func:`penalised`.
    """
    if not spec.beta:
        return
    responses, scores = open_private(round_.responses), open_private(round_.scores)
    log_ratio = log_ratio_to_base(round_.policy, responses, batch_size)
    values = penalised(scores.values, log_ratio, spec, round_.telemetry.reward_range)
    round_.scores = Private(Scores(values, scores.valid, scores.failures))


def penalised(rewards: Array, log_ratio: Array, spec: recipe.KL, bound: float) -> Array:
    """Return the rewards less the penalty, clipped to [−bound, bound].

    Args:
        rewards: ``[rows]``.
        log_ratio: log π_t − log π_ref of each response token, 0 on padding, ``[rows, response]``.
        spec: β and the level.
        bound: R.

    Returns:
        ``[rows]``, or with ``level: token`` ``[rows, response]``: at each token the reward-to-go,
        that is the reward less the penalties of this token and those after it. An earlier penalty
        does not depend on this token, so it would only add variance.
    """
    if spec.level == "sequence":
        less = rewards - spec.beta * log_ratio.sum(1)
    else:
        less = rewards[:, None] - spec.beta * log_ratio[:, ::-1].cumsum(1)[:, ::-1]
    clipped: Array = less.clip(-bound, bound)
    return clipped
