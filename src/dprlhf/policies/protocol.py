"""What an update asks of a policy, so that one update serves language models and small policies.

Updates are written against :class:`~dprlhf.policies.causal_lm.CausalLMPolicy`. ``pg`` and ``npg``
also run with an :class:`ExplicitPolicy`, which computes the scores ∇ log π_θ of its rows itself:
the policies of the papers' control tasks, with at most some hundred parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe


class Rows(Protocol):
    """The rows of a round's users. A row gets one score, and has one log-probability.

    A language model's row is a response (:class:`~dprlhf.rollout.Responses`); that of a control
    task is a trajectory, or one step of it.
    """

    @property
    def user(self) -> NDArray[np.int64]:
        """Which user each row belongs to, counted from 0 within the round, ``[rows]``."""

    @property
    def users(self) -> int:
        """The number of users in the round, those without a row included."""

    @property
    def from_base(self) -> NDArray[np.bool_]:
        """Whether each row was sampled from μ in place of π_θ, ``[rows]``."""

    @property
    def prompts(self) -> Sized:
        """What the rows answer; each prompt has the same number of adjacent rows."""


class Policy(Protocol):
    """What every update asks of a policy π_θ: parameters to move."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The trained parameters θ by name, in the order of a released gradient's coordinates."""

    @property
    def dimension(self) -> int:
        """The number d of trained parameters."""


@runtime_checkable
class ExplicitPolicy(Policy, Protocol):
    """A policy that computes the scores ∇ log π_θ of its rows itself, without autograd.

    Its rows are sampled from π_θ: it gives no log-probabilities, hence no importance ratios.
    """

    def user_scores(
        self, rows: Any, weights: NDArray[np.float64]
    ) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
        """Yield users with equally many rows, and the weighted score of each of their rows.

        What is yielded for one user must not depend on the others, not even by rounding. Nothing
        is clipped here: :mod:`dprlhf.gradients.clipping` does that.

        Args:
            rows: This policy's :class:`Rows`.
            weights: Weight of each row's ∇ log π_θ, ``[rows]``, or of each of its steps, ``[rows,
                steps]``.

        Yields:
            The users, ``[users]``, none of them twice, and Σ_steps weight · ∇ log π_θ of each row,
            ``[users, rows of each, dimension]``. Users without a row may be left out.
        """


@dataclass(frozen=True)
class Sampling:
    """How scores are changed and cut before a token is drawn; the defaults change nothing."""

    top_k: int = 0  # the most likely tokens, with all ties of the last; 0 for all
    top_p: float = 1.0  # the most likely tokens until their probability reaches this
    min_p: float = 0.0  # at least this share as likely as the most likely token

    @classmethod
    def of(cls, rollout: recipe.Rollout) -> Sampling:
        """Return the settings of the recipe's section."""
        return cls(**{name: getattr(rollout, name) for name in cls.__dataclass_fields__})

    @property
    def plain(self) -> bool:
        """Whether tokens come from the softmax of the logits as they are."""
        return self == Sampling()
