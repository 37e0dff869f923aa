"""Trajectories as the rows of ``updates/pg.py`` (a user's trajectory) and ``npg.py`` (a step)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from papers.control.policies import Array, ScoredPolicy
from papers.control.trajectories import Trajectories


@dataclass(frozen=True, repr=False)
class TrajectoryRows:
    """The rows of a round's trajectories (:class:`~dprlhf.policies.protocol.Rows`)."""

    chunks: list[Trajectories]
    by_step: bool  # Whether a row is one step; else it is a whole trajectory

    @property
    def users(self) -> int:
        """The number of users, those whose environment failed included."""
        return sum(chunk.users for chunk in self.chunks)

    @cached_property
    def user(self) -> NDArray[np.int64]:
        """Which user each row belongs to, ``[rows]``."""
        if not self.by_step:
            return np.arange(self.users)
        steps = [chunk.steps[: chunk.users] for chunk in self.chunks]
        return np.repeat(np.arange(self.users), np.concatenate(steps) if steps else 0)

    @property
    def from_base(self) -> NDArray[np.bool_]:
        """False: users act by the policy that is trained, ``[rows]``."""
        return np.zeros(len(self.user), dtype=bool)

    @property
    def prompts(self) -> range:
        """One for each row, so that no row is a baseline of another."""
        return range(len(self.user))

    def take(self, values: list[Array]) -> Array:
        """Return a number for each step, ``[chunk, horizon]`` each, as the rows have them."""
        pairs = zip(self.chunks, values, strict=True)
        parts = [of[: chunk.users] for chunk, of in pairs]
        if self.by_step:
            masks = [chunk.mask[: chunk.users] for chunk in self.chunks]
            parts = [part[mask] for part, mask in zip(parts, masks, strict=True)]
        empty = np.zeros(0 if self.by_step else (0, 1))
        return np.concatenate(parts) if parts else empty


@dataclass(frozen=True, repr=False, eq=False)
class ControlPolicy:
    """A small policy at its current parameters, an ``ExplicitPolicy``."""

    form: ScoredPolicy
    theta: torch.Tensor  # Parameters θ, [d], float64; the optimizer moves them

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """θ by its name."""
        return {"theta": self.theta}

    @property
    def dimension(self) -> int:
        """The number d of parameters."""
        return self.form.dimension

    def user_scores(
        self, rows: TrajectoryRows, weights: Array
    ) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
        """Yield users and Σ_steps weight · ∇ log π of each of their rows, ``[users, rows, d]``."""
        # A chunk of trajectories has a fixed shape, so no user rounds another's scores.
        theta = self.theta.detach().numpy()
        first = np.concatenate([[0], np.bincount(rows.user, minlength=rows.users).cumsum()])
        start = 0
        for chunk in rows.chunks:
            users = np.arange(start, start + chunk.users)
            start += chunk.users
            if not rows.by_step:
                of_steps = np.zeros_like(chunk.rewards)
                of_steps[: chunk.users] = weights[users]
                total = self.form.weighted_scores(
                    theta, chunk.observations, chunk.actions, of_steps
                )
                yield users, torch.from_numpy(total[: chunk.users, None])
                continue
            scores = self.form.scores(theta, chunk.observations, chunk.actions)
            for place, user in enumerate(users):
                weight = weights[first[user] : first[user + 1]]
                if len(weight):  # an environment that failed left no step
                    of_user = scores[place, : len(weight)] * weight[:, None]
                    yield users[place : place + 1], torch.from_numpy(of_user[None])
