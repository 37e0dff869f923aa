"""A distinguishing game: many runs of the mechanism, with and without one worst-case user.

A run uses the real partition, clipping, ledger and gate, with given vectors in place of gradients.
The user's vector points along the first coordinate and is far longer than the clip norm; the
adversary knows the others' vectors. Each run has its own key, derived from the game's seed. The
adversary sees every released vector and computes the likelihood ratio of the two cases, which is
the most powerful test (Neyman & Pearson), so this test would expose an ε that is too small.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.audit.bounds import epsilon_from_errors, gaussian_epsilon_from_errors
from dprlhf.audit.likelihood import log_likelihood_ratio, matched
from dprlhf.boundary import Private, open_private, open_released
from dprlhf.gradients.clipping import clipped_vectors
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import Plan

_FAR = 100.0


@dataclass(frozen=True)
class Game:
    """Outcome of a distinguishing game.

    Attributes:
        plan: Plan of the runs, with the claimed ε and δ.
        without: Log-likelihood ratio of each run without the user, ``[runs]``.
        with_user: Log-likelihood ratio of each run with the user, ``[runs]``.
    """

    plan: Plan
    without: NDArray[np.float64]
    with_user: NDArray[np.float64]

    def errors(self, threshold: float = 0.0) -> tuple[int, int]:
        """Return the numbers of false positives and false negatives at ``threshold``."""
        return int((self.without > threshold).sum()), int((self.with_user <= threshold).sum())

    def bound(self, confidence: float = 0.95, threshold: float = 0.0) -> float:
        """Return a lower bound on ε, for a threshold that was fixed before the game.

        ``fixed`` and ``stream`` amount to one Gaussian release, so the tight bound for GDP holds;
        other partitions get the general one.
        """
        of = (
            gaussian_epsilon_from_errors
            if self.plan.mechanism.spec.disjoint
            else epsilon_from_errors
        )
        runs = len(self.without)
        return of(*self.errors(threshold), runs, self.plan.guarantee.delta, confidence)


def play(plan: Plan, runs: int, seed: int, *, others: int = 1) -> Game:
    """Run the mechanism ``runs`` times without the user and ``runs`` times with it.

    Under replace-one, "without" means that another user with the opposite vector takes its place.

    Args:
        plan: Plan of the runs, small: each allocates ``plan.users`` users and releases
            ``plan.rounds`` · ``plan.releases_per_round`` sums.
        runs: Number of runs with the user, and the same number without.
        seed: Seed of the runs' keys.
        others: Number of further coordinates; the other users' vectors are constant over them.
    """
    scores = []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for sign in (-1.0 if plan.adjacency == "replace-one" else 0.0, 1.0):
            seen = []
            for run in range(runs):
                key = hashlib.sha256(f"{seed} {sign} {run}".encode()).digest()
                seen.append(_run(plan, key, sign, others, Path(folder) / "ledger.jsonl"))
            scores.append(_scores(plan, seen))
    return Game(plan, *scores)


def _run(
    plan: Plan, key: bytes, sign: float, others: int, path: Path
) -> tuple[NDArray[np.float64], int | None]:
    """Return the adversary's view: the first coordinate per round (in units of S), and the round.

    With ``fixed`` and ``stream``, ε also holds against those who know the user's round, so it is
    returned, from 0; with the other partitions it is None.
    """
    allocation = open_private(allocate(plan, key))
    path.unlink(missing_ok=True)
    ledger = Ledger(path, plan.terms())
    gate = Gate(plan, ledger, key)
    seen, told = np.zeros(plan.rounds), None
    for t in range(1, plan.rounds + 1):
        users = allocation.round(t)
        vectors = torch.zeros(len(users), 1 + others, dtype=torch.float64)
        vectors[:, 1:] = _FAR * plan.clip_norm
        vectors[users == 0] = 0.0
        vectors[users == 0, 0] = sign * _FAR * plan.clip_norm
        if plan.mechanism.spec.disjoint and (users == 0).any():
            told = t - 1
        for _ in range(plan.releases_per_round):
            clipped = clipped_vectors(
                Private([(np.arange(len(users)), vectors)]),
                1 + others,
                extra=Private(np.zeros((len(users), 0))),
                extra_norm=0.0,
                clip_norm=plan.clip_norm,
                reduce=lambda total: total,
            )
            seen[t - 1] += float(open_released(gate.release(t, clipped.bounded), "the game")[0])
    ledger.close()
    return seen * plan.expected_batch_size / plan.clip_norm / plan.releases_per_round, told


def _scores(plan: Plan, seen: list[tuple[Any, int | None]]) -> NDArray[np.float64]:
    observed = np.array([x for x, _ in seen])
    told = np.array([-1 if t is None else t for _, t in seen])
    return log_likelihood_ratio(matched(observed, plan), plan, told)
