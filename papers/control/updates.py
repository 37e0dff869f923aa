"""The private updates of control tasks: the language models' DP-PG and DP-NPG, and PGPE.

A user's contribution is computed from its own trajectory and released values only, except with the
baselines ``batch`` and ``critic``, whose runs state no ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from pydantic import Field

from dprlhf import recipe
from dprlhf.boundary import Private, open_released
from dprlhf.gradients.clipping import clipped_vectors
from dprlhf.policies.optimizers import ascend
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import PositiveFloat, Settings
from dprlhf.rewards import Scores
from dprlhf.updates.npg import npg as npg_on_rows
from dprlhf.updates.pg import policy_gradient
from dprlhf.updates.round import PrivateRound
from dprlhf.updates.telemetry import TelemetryCoordinates
from papers.control.policies import Array, ScoredPolicy, TrajectoryPolicy
from papers.control.trajectories import ControlPolicy, Trajectories, TrajectoryRows

LEAKS = {
    "batch": "advantages normalised over the batch couple all users of a round",
    "critic": "an un-noised critic carries earlier users into later rounds",
}
"""Baselines of the papers' own runs, and why no ε holds with them."""


class Advantage(Settings):
    """Advantage of step t: Â_t = Σ_k γ^{k−t} (r_k − ρ), and −γ^{L−t} ρ/(1−γ) for an end at step L.

    This is the discounted return, compared with a reward of ρ at every step for ever. For CartPole
    with ρ = 1 it is the blame −γ^{L−t}/(1−γ) for a fall, and 0 in an episode that the time limit
    cut. γ and ρ are public, so each advantage depends on one user alone.
    """

    discount: Annotated[float, Field(ge=0, lt=1)] = 0.99  # Discount factor γ
    reference: float = 0.0  # Reference reward ρ, subtracted from the reward of every step
    baseline: Literal["public", "batch", "critic"] = "public"


AnyRound = PrivateRound[ControlPolicy, TrajectoryRows]


@dataclass(repr=False, eq=False)
class ControlRound:
    """One round of a control task: the trajectories of its users, and the way to the policy."""

    number: int
    policy: TrajectoryPolicy  # The form of π_θ
    theta: torch.Tensor  # Parameters θ_t, [d], float64; the update moves them
    trajectories: Private[list[Trajectories]]
    plan: Plan  # The clip norm S, the noise multiplier and the expected batch size
    gate: Gate  # The run's way from a clipped sum to a released mean
    optimizer: torch.optim.Optimizer
    memory: dict[str, Any]  # What later rounds use, by name: released, or the critic, Private
    directions: Array | None = None  # Public perturbations of pgpe, [K, d]

    def as_rows(self, spec: Advantage, *, by_step: bool) -> AnyRound:
        """Return the round as the language models' updates take it, with advantages as scores."""
        rows = self.trajectories.map(lambda chunks: TrajectoryRows(chunks, by_step))
        return PrivateRound(
            policy=ControlPolicy(cast(ScoredPolicy, self.policy), self.theta), responses=rows,
            scores=rows.map(_scores, advantages(self, spec)), plan=self.plan,
            telemetry=TelemetryCoordinates(norm=0.0, reward_range=1.0), optimizer=self.optimizer,
            reduce=lambda total: total, t=self.number,
            gate=lambda bounded: self.gate.release(self.number, bounded),
        )  # fmt: skip


def _scores(rows: TrajectoryRows, values: list[Array]) -> Scores:
    """Return advantages, ``[chunk, horizon]`` each, as the scores of rows, all valid."""
    return Scores(rows.take(values), np.ones(len(rows.user), dtype=bool), {})


class TrajectoryPG(Settings):
    """DP-PG on trajectories: a user contributes Σ_t Â_t ∇ log π(a_t|s_t), clipped to S."""

    name: Literal["pg"] = "pg"
    clip_norm: PositiveFloat = 1.0  # L2 bound S on a user's contribution
    advantage: Advantage = Advantage()  # How the advantages Â_t are computed from rewards


def pg(round_: ControlRound, spec: TrajectoryPG) -> None:
    """Run DP-PG (He & Zhou, Algorithm 2), each user with the sum over its trajectory's steps."""
    rows = round_.as_rows(spec.advantage, by_step=False)
    # The scores of rows are advantages already.
    policy_gradient(rows, recipe.PG.model_construct(clip_norm=spec.clip_norm, baseline="none"))


class TrajectoryNPG(Settings):
    """DP-NPG on trajectories: a user's loss is the mean over its steps of (w · φ_t − Â_t)²."""

    name: Literal["npg"] = "npg"
    clip_norm: PositiveFloat = 1.0  # Bound B on ‖φ_t‖; longer scores are scaled down to it
    advantage: Advantage = Advantage()  # How the advantages Â_t are computed from rewards
    oracle: recipe.Oracle = recipe.Oracle(name="sufficient-statistics", target_bound=1.0)


def npg(round_: ControlRound, spec: TrajectoryNPG) -> None:
    """Run DP-NPG (He & Zhou, Algorithm 3), each user with the mean over its trajectory's steps."""
    settings = recipe.NPG.model_construct(
        name="npg", clip_norm=spec.clip_norm, baseline="none", oracle=spec.oracle
    )
    npg_on_rows(round_.as_rows(spec.advantage, by_step=True), settings)


class PGPE(Settings):
    """Parameter-exploring policy gradient (Sehnke et al. 2010) along public directions.

    Each round has d public, orthogonal directions of norm σ√d, drawn afresh. User u picks one and a
    sign at random, acts with θ ± it, and contributes ± clip((return − b)/c, ±1) in that one of d
    coordinates. The policy may be deterministic.
    """

    name: Literal["pgpe"] = "pgpe"
    clip_norm: PositiveFloat = 1.0  # L2 bound S on a user's contribution
    perturb: PositiveFloat = 0.1  # Scale σ of the perturbations, for each parameter
    center: float = 0.0
    spread: PositiveFloat = 1.0  # Unit c of returns: a return c above b, or more, contributes 1
    share: Annotated[float, Field(ge=0, lt=1)] = 0.3

    def draw(self, rng: np.random.Generator, dimension: int) -> Array:
        """Return a round's directions, ``[d, d]``; public."""
        basis, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
        return np.asarray(self.perturb * math.sqrt(dimension) * basis.T)


def pgpe(round_: ControlRound, spec: PGPE) -> None:
    """Move along the directions in proportion to the noised mean of ± (return − b)."""
    directions = round_.directions
    assert directions is not None
    baseline = round_.memory.setdefault("return", spec.center)

    count, width = len(directions), 1 if spec.share else 0
    size = spec.share * round_.plan.clip_norm

    def contributions(chunks: list[Trajectories]) -> Array:
        """Return what each user adds along each direction and to the mean return."""
        parts = [np.zeros((0, count + width))]
        for chunk in chunks:
            scaled = np.clip((chunk.returns - baseline) / spec.spread, -1.0, 1.0)
            worth = np.where(chunk.steps > 0, scaled, 0.0)[:, None]
            both = np.concatenate([worth * chunk.choice, size * worth[:, :width]], 1)
            parts.append(both[: chunk.users])
        return np.concatenate(parts)

    users = round_.trajectories.map(contributions)
    clipped = clipped_vectors(
        users.map(lambda rows: [(np.arange(len(rows)), torch.from_numpy(rows[:, :count]))]),
        count, extra=users.map(lambda rows: rows[:, count:]), extra_norm=size,
        clip_norm=round_.plan.clip_norm, reduce=lambda total: total,
    )  # fmt: skip
    released = round_.gate.release(round_.number, clipped.bounded)
    moves, of_return = released.split([count, width])
    if spec.share:
        seen = baseline + spec.spread * float(open_released(of_return, "pgpe")) / size
        round_.memory["return"] = (baseline + seen) / 2
    direction = moves.map(lambda mean: torch.from_numpy(directions).T @ mean / spec.perturb)
    ascend([round_.theta], round_.optimizer, direction)


UPDATES: dict[str, Callable[[ControlRound, Any], None]] = {"pg": pg, "npg": npg, "pgpe": pgpe}
"""The updates by their name in a recipe; each takes the round and its own settings."""


def advantages(round_: ControlRound, spec: Advantage) -> Private[list[Array]]:
    """Return the advantages of each chunk's steps, ``[chunk, horizon]``; 0 where there is none."""
    fitted: Private[Fitted | None] = Private(None)
    if spec.baseline == "critic":  # not private: fitted, without noise, on users of earlier rounds
        fitted = round_.memory.get("critic", fitted)
        round_.memory["critic"] = round_.trajectories.map(partial(_refitted, spec), fitted)
    return round_.trajectories.map(partial(_advantages, spec), fitted)


Fitted = tuple[Array, Array]
"""Gram matrix and moments of the linear value function, over the users of earlier rounds."""


def _refitted(spec: Advantage, chunks: list[Trajectories], fitted: Fitted | None) -> Fitted | None:
    """Return the critic's normal equations with a round's users added, without noise."""
    for chunk in chunks:
        inputs = _critic_inputs(chunk.observations)[chunk.mask]
        gram, moment = fitted or (np.eye(inputs.shape[1]), np.zeros(inputs.shape[1]))
        returns = discounted(chunk, spec.discount, spec.reference)[chunk.mask]
        fitted = gram + inputs.T @ inputs, moment + inputs.T @ returns
    return fitted


def _advantages(spec: Advantage, chunks: list[Trajectories], fitted: Fitted | None) -> list[Array]:
    values = [discounted(chunk, spec.discount, spec.reference) for chunk in chunks]
    pairs = list(zip(chunks, values, strict=True))
    if fitted is not None:  # what the critic's value is exceeded by
        weights = np.linalg.solve(*fitted)
        values = [value - _critic_inputs(chunk.observations) @ weights for chunk, value in pairs]
    elif spec.baseline == "batch":  # not private: one user's return moves all others' advantages
        taken = np.concatenate([np.zeros(0), *(value[chunk.mask] for chunk, value in pairs)])
        middle, width = (taken.mean(), taken.std() + 1e-8) if len(taken) else (0.0, 1.0)
        values = [(value - middle) / width for value in values]
    return [np.where(chunk.mask, value, 0.0) for chunk, value in zip(chunks, values, strict=True)]


def _critic_inputs(observations: Array) -> Array:
    ones = np.ones((*observations.shape[:-1], 1))
    return np.concatenate([observations, observations**2, ones], -1)


def discounted(chunk: Trajectories, discount: float, reference: float) -> Array:
    """Return Σ_k γ^{k−t}(r_k − ρ) and the end's −γ^{L−t} ρ/(1−γ), ``[chunk, horizon]``."""
    value = np.where(chunk.terminated, -reference / (1 - discount), 0.0)
    out = np.zeros_like(chunk.rewards)
    mask = chunk.mask
    for t in reversed(range(chunk.rewards.shape[1])):
        here = mask[:, t]
        value = np.where(here, chunk.rewards[:, t] - reference + discount * value, value)
        out[:, t] = np.where(here, value, 0.0)
    return out
