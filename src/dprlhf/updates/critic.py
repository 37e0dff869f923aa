"""A differentially private critic: V(x) = w · φ(x), and w is computed from noised releases alone.

φ(x) ∈ R^{1+p}, ‖φ‖ ≤ 1, is a constant and p features of the prompt: the frozen base model's last
hidden state, projected on the p principal directions of PUBLIC prompts and scaled equally. No user
influences φ, and it is the same in all rounds.

Once a round, user u contributes its part of the least-squares normal equations, the mean over its
responses of φ(x) r(x, y)/R, of norm at most 1. Scaled to √share · S it rides in the round's release
beside the gradient, which is clipped to what is left of S. One joint Gaussian with noise multiplier
z is then two: the critic's, with z/√share, and that of the rest, with z/√(1 − share); the inverse
squares add up to 1/z². The ledger's charge covers the joint vector, so a round costs no more than
one without a critic. The server updates w ← (1 − η_t) w + η_t G⁻¹ (released mean) R with G = E φφᵀ
over public prompts and η_t = max(η, 1/t), which follows a policy whose rewards rise. That is
post-processing. Where users' prompts are unlike the public ones, V is less accurate, but privacy is
not affected.

A round's advantages use V from before the round. V(x) is then independent of the round's responses,
so it does not bias the gradient, and it depends on earlier users through released values only.
Rio et al. (arXiv 2501.19080, appendix C.2.1) fit their critic without noise: it carries the users
of one round into the releases of the next.

Within a prompt V(x) is a constant, which ``loo`` and ``paired`` would subtract again. So the two
advantages are averaged: Â = (1 − weight)(r − baseline) + weight (r − V(x)). With k responses of
variance σ² and V off by e, loo's advantage has variance σ²k/(k − 1), and r − V(x) has mean square
σ² + e².
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Released, open_released
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.plan import Plan
from dprlhf.rollout.batch import padded_width
from dprlhf.updates.privls.oracle import bounded_rows

Array = NDArray[np.float64]

_STATE = ("w", "centre", "directions", "inverse")


class Critic:
    """The value function V as a :class:`~dprlhf.updates.rider.Rider`: bounded, noised releases.

    Args:
        spec: The recipe's ``update.critic``.
        norm: The L2 bound √share · S on a user's coordinates.
        reward_range: The bound R on rewards, which are in [−R, R].
        max_prompt_tokens: Public bound on the tokens of a prompt.
        hidden: Size of a hidden state.

    Attributes:
        w: The weights of V, ``[1 + p]``, float64; computed from released values only.
        centre: Mean hidden state of the public prompts, ``[hidden]``.
        directions: Principal directions of the public hidden states h, ``[p, hidden]``, scaled so
            that ``directions @ (h − centre)`` has mean square norm 1.
        inverse: G⁻¹, the inverse second-moment matrix of public features, ``[1 + p, 1 + p]``.
    """

    penalised = True
    """V predicts the rewards that the update sees, with the KL penalty subtracted."""

    def __init__(
        self,
        spec: recipe.Critic,
        norm: float,
        reward_range: float,
        max_prompt_tokens: int,
        hidden: int,
    ) -> None:
        self.spec = spec
        self.norm = norm
        self.reward_range = reward_range
        self.w = torch.zeros(1 + spec.features, dtype=torch.float64)
        self.centre = torch.zeros(hidden, dtype=torch.float64)
        self.directions = torch.zeros(spec.features, hidden, dtype=torch.float64)
        self.inverse = torch.eye(1 + spec.features, dtype=torch.float64)
        self._max_prompt_tokens = max_prompt_tokens

    @classmethod
    def from_plan(
        cls,
        spec: recipe.Critic,
        plan: Plan,
        policy: CausalLMPolicy,
        reward_range: float,
        max_prompt_tokens: int,
    ) -> Critic:
        """Return a critic whose norm is √share of the plan's clip norm (of 1 without clipping)."""
        scale = plan.clip_norm if math.isfinite(plan.clip_norm) else 1.0
        hidden = policy.model.get_input_embeddings().weight.shape[1]
        norm = math.sqrt(spec.share) * scale
        return cls(spec, norm, reward_range, max_prompt_tokens, hidden)

    @property
    def count(self) -> int:
        """The number of coordinates, 1 + p."""
        return len(self.w)

    @property
    def weight(self) -> float:
        """The share of r − V(x) in an advantage; 0 before the first release."""
        return self.spec.weight if bool(self.w.any()) else 0.0

    @property
    def mean_value(self) -> float:
        """The value V at the mean of the public prompts' features."""
        return float(self.w[0]) / math.sqrt(2 if self.spec.features else 1)

    def fit_features(self, policy: CausalLMPolicy, prompts: Sequence[list[int]]) -> None:
        """Fit ``centre``, ``directions`` and ``inverse`` to PUBLIC prompts, given as token ids.

        Raises:
            DprlhfError: There are fewer than four prompts for each feature.
        """
        size = self.spec.features
        if not size:
            return
        if len(prompts) < 4 * size:
            raise DprlhfError(
                f"update.critic.features {size} needs at least {4 * size} public prompts, and"
                f" evaluation gives {len(prompts)}: lower it (0 needs none)"
            )
        states = self._states(policy, prompts)
        self.centre = states.mean(0)
        _, spread, directions = torch.linalg.svd(states - self.centre, full_matrices=False)
        usable = spread[:size, None] > 1e-6 * spread[0]
        scaled = directions[:size] * math.sqrt(len(prompts) / size)
        self.directions = torch.where(usable, scaled / spread[:size, None], 0.0)
        public = torch.from_numpy(self._features_of(states))
        self.inverse = torch.linalg.pinv(public.T @ public / len(public), hermitian=True)

    def features(self, policy: CausalLMPolicy, prompts: Sequence[list[int]]) -> Array:
        """Return the features φ of each prompt (token ids), ``[prompts, 1 + p]``, of norm ≤ 1."""
        if not self.spec.features:
            return np.ones((len(prompts), 1))
        return self._features_of(self._states(policy, prompts))

    def _features_of(self, states: torch.Tensor) -> Array:
        # Not a matrix product: its rounding of a row depends on the number of rows.
        centred = states - self.centre
        x = torch.stack([(centred * d).sum(1) for d in self.directions], dim=1).nan_to_num()
        u, _ = bounded_rows(x, x[:, 0], 1.0, 1.0)
        both: Array = (F.pad(u, (1, 0), value=1.0) / math.sqrt(2)).numpy()
        return both

    def values(self, features: Array) -> Array:
        """Return V(x) clipped to [−R, R], one for each row of ``features``."""
        bound = self.reward_range
        found: Array = (features * self.w.numpy()).sum(1).clip(-bound, bound)
        return found

    def of_users(
        self,
        user: NDArray[np.int64],
        rewards: Array,
        valid: NDArray[np.bool_],
        features: Array | None,
    ) -> Array:
        """Return each user's coordinates, ``[users, 1 + p]``, of norm at most ``norm``.

        Args:
            user: Index of each row's user, ``[rows]``, from 0.
            rewards: Rewards less the KL penalty, ``[rows]``.
            valid: Mask of the users with valid rewards, ``[users]``; the others are zero.
            features: The features φ of each row's prompt, ``[rows, 1 + p]``.
        """
        assert features is not None
        scaled = rewards.clip(-self.reward_range, self.reward_range) / self.reward_range
        sums = np.zeros((len(valid), self.count))
        np.add.at(sums, user, features * scaled[:, None])
        rows = np.maximum(np.bincount(user, minlength=len(valid)), 1)
        return np.where(valid[:, None], self.norm * sums / rows[:, None], 0.0)

    def read(self, released: Released[torch.Tensor], t: int) -> None:
        """Update w by the released mean of the coordinates, ``[1 + p]``, of round t.

        Raises:
            TypeError: The coordinates did not come from the gate.
        """
        mean = open_released(released, "the critic")
        solved = self.inverse @ mean * (self.reward_range / self.norm)
        self.w = self.w.lerp(solved, max(self.spec.step_size, 1 / t))

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint keeps, all of them released or public."""
        return {name: getattr(self, name).contiguous() for name in _STATE}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        for name in _STATE:
            setattr(self, name, state[name])

    def _states(self, policy: CausalLMPolicy, prompts: Sequence[list[int]]) -> torch.Tensor:
        """Return the base model's last hidden state of each prompt, ``[prompts, hidden]``.

        Each prompt is its own forward pass, in a shape fixed by its own length: on several threads,
        the rounding of a row depends on its place in the batch, which other users decide.
        """
        found = torch.zeros(len(prompts), len(self.centre), dtype=torch.float64)
        lengths = np.array([len(p) for p in prompts], dtype=np.int64)
        widths = padded_width(lengths, self._max_prompt_tokens)
        with policy.base():
            for row, (prompt, width) in enumerate(zip(prompts, widths, strict=True)):
                tokens = torch.zeros((1, int(width)), dtype=torch.long)
                mask = torch.zeros_like(tokens)
                tokens[0, -len(prompt) :] = torch.tensor(prompt)
                mask[0, -len(prompt) :] = 1
                states = policy.last_states(tokens.to(policy.device), mask.to(policy.device))
                found[row] = states[0].double().cpu()
        return found
