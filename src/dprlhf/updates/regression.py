"""Private least squares over a round's users: the regression oracle of DP-NPG and DP-REBEL.

An example is one or several rows of a user, with a feature φ = Σ_rows weight · ∇ log π(y|x) and a
target A. A user's loss is the mean over its examples of (w · φ − A)². The oracles
(:mod:`dprlhf.updates.oracles`) ask for noised means over users of a function of φ and A; each
answer is one release through the round's gate. The policy does not move meanwhile, so features are
computed once and cached for the later answers, if they take no more than ``KEPT_BYTES``; otherwise
they exist for one micro-batch at a time, and each answer takes a forward and a backward pass.

``update.clip_norm`` is the oracles' B, the bound on ‖φ‖. A contribution with L2 bound b (at most
2BR for a gradient, 1 for sufficient statistics) is scaled to the clip norm, clipped, summed,
released, and scaled back. A ``gain`` above 1 scales it beyond the clip norm, so that large
contributions are clipped: the sensitivity is the same, and the noise is smaller relative to the
rest. A user is one vector in that sum, however many examples it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private, Read, Released, post_process
from dprlhf.errors import DprlhfError
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.protocol import Rows
from dprlhf.rollout.logprobs import Array
from dprlhf.updates.oracles import (
    LARGEST_DIMENSION,
    Contribution,
    ImproperBatchSGD,
    ProjectedSGD,
    SufficientStatistics,
    project,
)
from dprlhf.updates.round import P, PrivateRound, R

_ORACLES: dict[str, type[SufficientStatistics | ImproperBatchSGD | ProjectedSGD]] = {
    "sufficient-statistics": SufficientStatistics,
    "improper-batch-sgd": ImproperBatchSGD,
    "projected-sgd": ProjectedSGD,
}

KEPT_BYTES = 2**30
"""The largest memory of a round's cached features on one process, in bytes."""

Batch = tuple[NDArray[np.int64], NDArray[np.int64], torch.Tensor, torch.Tensor, bool]
"""Users, the first row of each of their examples, features, targets, and whether these are the
users' last examples; see :func:`~dprlhf.gradients.micro_batches.user_gradients`."""


@dataclass(frozen=True, repr=False)
class Examples:
    """The examples of a round's users."""

    responses: Rows
    weights: Array  # Weight of each row's ∇ log π, [rows]
    targets: Array  # Targets A, [examples]
    rows: int  # Number of rows in an example
    kept: list[Batch] = field(default_factory=list)


def solve(
    round_: PrivateRound[P, R],
    examples: Private[Examples],
    spec: recipe.Oracle,
    *,
    target_bound: float,
    batch_size: int,
) -> Released[torch.Tensor]:
    """Return the oracle's solution w, ``[dimension]``, with ‖w‖ ≤ W."""
    dimension = round_.policy.dimension
    settings: dict[str, Any] = {
        "feature_bound": round_.plan.clip_norm,
        "target_bound": spec.target_bound or target_bound,
        "radius": spec.radius,
        "steps": spec.steps,
        "step_size": spec.step_size,
        "damping": spec.damping or 0.0,
    }
    kind = _ORACLES[spec.name]
    oracle = kind(**{own.name: settings[own.name] for own in fields(kind)})

    def solution(read: Read) -> torch.Tensor:
        # An oracle reads released values and nothing else about users.
        release = RoundRelease(
            round_, examples, dimension, batch_size, read, spec.gain, several=oracle.releases > 1
        )
        return project(oracle.solve(release, dimension), spec.radius)

    return post_process(solution)


def check_dimension(update: recipe.PrivateUpdate, dimension: int) -> None:
    """Check that the recipe's oracle can solve for as many parameters as the adapter has."""
    spec = update.least_squares
    if spec is None:
        return
    if spec.name == "sufficient-statistics" and dimension > LARGEST_DIMENSION:
        raise DprlhfError(
            f"update.oracle: sufficient-statistics takes at most {LARGEST_DIMENSION} dimensions,"
            f" and the adapter has {dimension}: write name: projected-sgd"
        )


@dataclass(repr=False, eq=False)
class RoundRelease:
    """A :class:`~dprlhf.updates.oracles.Release` over a round's users, through its gate."""

    round_: PrivateRound[Any, Any]  # The round, whose gate releases the answers
    examples: Private[Examples]
    size: int
    batch_size: int
    read: Read  # Returns the tensor inside a Released for the oracle
    gain: float = 1.0  # Factor on users' contributions before they are clipped
    several: bool = False
    noise_multiplier: float = field(init=False)

    def __post_init__(self) -> None:
        round_ = self.round_
        share = round_.plan.clip_norm / round_.vector_clip_norm
        self.noise_multiplier = round_.plan.noise_multiplier * share / self.gain

    @property
    def expected_batch_size(self) -> float:
        """The divisor m of a sum, a public constant."""
        return self.round_.plan.expected_batch_size

    def __call__(self, contribution: Contribution, bound: float) -> torch.Tensor:
        """Return (Σ_u clip(gain · mean of u's contributions, bound) + noise) / (m · gain)."""
        scale = self.gain * self.round_.vector_clip_norm / bound
        width = contribution(torch.zeros(0, self.size), torch.zeros(0)).shape[1]
        vectors = self.examples.map(lambda given: self._vectors(given, contribution, scale))
        clipped = self.round_.clipped_vectors(vectors, dimension=width)
        return self.read(self.round_.release(clipped)) / scale

    def _vectors(
        self, given: Examples, contribution: Contribution, scale: float
    ) -> Iterable[tuple[NDArray[np.int64], torch.Tensor]]:
        owner = given.responses.user[:: given.rows]
        count = np.bincount(owner, minlength=given.responses.users).clip(min=1)
        earlier = torch.zeros(())
        for users, first, features, targets, last in self._batches(given):
            real = torch.from_numpy(first >= 0)
            parts = contribution(features, targets).view(*real.shape, -1)
            earlier = earlier + torch.where(real[:, :, None], parts, 0.0).sum(1)
            if last:
                yield users, scale * earlier / torch.from_numpy(count[users, None]).to(earlier)
                earlier = torch.zeros(())
            if self.round_.tick is not None:
                self.round_.tick(int(real.sum()) * given.rows)

    def _batches(self, given: Examples) -> Iterable[Batch]:
        if given.kept:
            yield from given.kept
            return
        keep: list[Batch] = []
        for users, first, gradients, last in user_gradients(
            self.round_.policy,
            given.responses,
            given.weights,
            batch_size=self.batch_size,
            rows=given.rows,
        ):
            features = gradients.flatten(0, 1).cpu()
            own = np.where(first < 0, 0.0, given.targets[first // given.rows])
            batch = users, first, features, torch.from_numpy(own.ravel()).to(features), last
            needed = len(given.targets) * self.size * features.element_size()
            if self.several and needed <= KEPT_BYTES:
                keep.append(batch)
            yield batch
        given.kept.extend(keep)
