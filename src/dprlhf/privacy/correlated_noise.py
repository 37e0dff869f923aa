"""Correlated noise for one pass: the banded square root of the prefix-sum matrix.

Where each user takes part in one round, the rounds' sums x_1..x_T may be released as rows of
C⁻¹(Cx + zSξ) with C lower triangular: each round gets noise (C⁻¹ξ)_t in place of ξ_t, and later
rounds cancel some of the noise of earlier ones, so that the sum over rounds, by which SGD moves,
has less. One user enters Cx through one column, whose norm is 1 here. So the privacy cost is that
of independent noise with the same zS: one Gaussian mechanism (Denisov et al., arXiv 2202.08312,
section 2, adaptive x included; Choquette-Choo et al., arXiv 2306.08153, for bands).

C is the Toeplitz square root of the prefix-sum matrix, with c_k = binom(2k, k)/4^k (Fichtenberger
et al., arXiv 2202.11205), cut to b bands (Kalinin and Lampert, arXiv 2405.13763), its columns
scaled to norm 1 and its entries rounded down to multiples of 2⁻²⁰, so that the gate can take back
noise without rounding errors; b = 1 is independent noise. McKenna (arXiv 2405.15913) optimizes the
bands numerically; the square root needs no solver.

That is the cost for disjoint batches (``fixed``, ``stream``). Where users draw their own secret
rounds it is less, and depends on C: :mod:`dprlhf.privacy.correlated_allocation`.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

UNITS = 2**20
"""The entries of C are multiples of 1 / UNITS."""


@functools.cache
def square_root(rounds: int, bands: int) -> NDArray[np.float64]:
    """Return the bands of C: entry ``[t, k]`` is C[t, t − k], and 0 where t < k."""
    bands = min(bands, rounds, 1024)
    k = np.arange(1, bands)
    coefficients = np.cumprod(np.append(1.0, (2 * k - 1) / (2 * k)))
    # Column s holds c_0, c_1, ... down to the last round.
    lengths = np.minimum(rounds - np.arange(rounds), bands)
    norms = np.sqrt(np.cumsum(coefficients**2))[lengths - 1]
    column = np.arange(rounds)[:, None] - np.arange(bands)
    scaled = coefficients / norms[np.maximum(column, 0)]
    if bands > 1:  # down, and by more than float64 arithmetic errs
        scaled = np.floor(scaled * (1 - 2.0**-40) * UNITS) / UNITS
    return np.where(column >= 0, scaled, 0.0)


@functools.lru_cache(64)
def noise_matrix(rounds: int, bands: int) -> NDArray[np.float64]:
    """Return C, ``[rounds, rounds]``: lower triangular, non-negative, columns of norm ≤ 1."""
    banded = square_root(rounds, bands)
    full = np.zeros((rounds, rounds))
    for k in range(banded.shape[1]):
        late = np.arange(k, rounds)
        full[late, late - k] = banded[k:, k]
    return full


def noise_gain(rounds: int, bands: int, round_: int) -> float:
    """Return the norm of row t of C⁻¹: the factor by which correlation scales round t's noise."""
    return 1.0 if bands == 1 else float(_gains(rounds, bands)[round_ - 1])


@functools.cache
def _gains(rounds: int, bands: int) -> NDArray[np.float64]:
    """Return the norms of the rows of C⁻¹, ``[rounds]``, from one pass over the rows."""
    # Row t is (e_t − Σ_k C[t, t−k] row_{t−k}) / C[t, t], with the b − 1 rows before it.
    root = square_root(rounds, bands)
    before = np.zeros((max(1, root.shape[1] - 1), rounds))  # row s at place s mod (b − 1)
    norms = np.empty(rounds)
    for t in range(rounds):
        k = np.arange(1, min(root.shape[1], t + 1))
        weights = np.zeros(len(before))
        weights[(t - k) % len(before)] = root[t, k]
        row = -weights @ before[:, : t + 1]
        row[t] += 1.0
        row /= root[t, 0]
        norms[t] = np.linalg.norm(row)
        before[t % len(before), : t + 1] = row
    return norms
