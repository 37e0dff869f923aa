"""Closed forms printed in the source papers, by name, and what they really spend.

**None of these is used for a guarantee.** They exist for comparison plots and for the tests that
show where a printed formula falls short; :mod:`dprlhf.privacy.accounting` has the numbers to use.

HZ is He & Zhou, arXiv 2510.21060; Rio is Rio et al., arXiv 2501.19080.
"""

from __future__ import annotations

import math

from dprlhf.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier


def he_zhou_theorem_1_noise(
    epsilon: float, delta: float, *, reward_bound: float, score_bound: float, batch: int
) -> float:
    """Noise standard deviation of HZ Theorem 1 (and 5) as printed. Not for a guarantee.

    sigma² = 16 ln(1.25/delta) R² G² / (m² eps²). It spends more than ``epsilon``: see
    :func:`he_zhou_theorem_1_epsilon_spent`.

    Args:
        epsilon: the epsilon that the theorem claims.
        delta: the delta that it claims.
        reward_bound: R, the bound on |reward|; advantages are then at most 2R.
        score_bound: G, the bound on the norm of the gradient of log pi.
        batch: m, users per round.
    """
    return math.sqrt(16 * math.log(1.25 / delta)) * reward_bound * score_bound / (batch * epsilon)


def he_zhou_sensitivity(*, reward_bound: float, score_bound: float, batch: int) -> float:
    """Replace-one sensitivity of HZ's averaged gradient: 4 R G / m, since |advantage| <= 2R."""
    return 4 * reward_bound * score_bound / batch


def he_zhou_theorem_1_epsilon_spent(claimed: float, delta: float) -> float:
    """Epsilon that the printed noise of HZ Theorem 1 really spends, at the same delta.

    The theorem needs 32 in place of 16, and the classical formula needs epsilon < 1.

    >>> [round(he_zhou_theorem_1_epsilon_spent(e, 1e-5), 3) for e in (1, 3, 5)]
    [1.098, 3.756, 6.825]
    """
    # R, G and m cancel.
    noise = he_zhou_theorem_1_noise(claimed, delta, reward_bound=1, score_bound=1, batch=1)
    sensitivity = he_zhou_sensitivity(reward_bound=1, score_bound=1, batch=1)
    return gaussian_epsilon(noise / sensitivity, delta)


def he_zhou_noise_needed(
    epsilon: float, delta: float, *, reward_bound: float, score_bound: float, batch: int
) -> float:
    """Noise standard deviation with which HZ's update is really (epsilon, delta)-DP.

    The analytic Gaussian mechanism at the true sensitivity, replace-one adjacency.
    """
    sensitivity = he_zhou_sensitivity(
        reward_bound=reward_bound, score_bound=score_bound, batch=batch
    )
    return sensitivity * gaussian_noise_multiplier(epsilon, delta)


def rio_b1_classical_epsilon(noise: float, delta: float) -> float:
    """Rio appendix B.1, first formula: sqrt(2 ln(1.25/delta)) / z. Not for a guarantee.

    Valid only where it gives less than 1; it is returned outside that range too, because the
    paper's own "z = 0.1, 0.5 is epsilon = 38, 8" (at delta = 1e-3) uses it there.
    """
    return math.sqrt(2 * math.log(1.25 / delta)) / noise


def rio_b1_zhao_epsilon(noise: float, delta: float) -> float:
    """Rio appendix B.1, second formula (Zhao et al. 2019, Theorem 5). Not for a guarantee.

    (1 + 2 sqrt(2) C z) / (2 z²) with C = sqrt(ln(2 / (sqrt(16 delta + 1) - 1))): valid for
    delta < 1/2 but loose.
    """
    # sqrt(1 + x) - 1 as x / (sqrt(1 + x) + 1), which keeps its digits for small delta.
    c = math.sqrt(math.log(2 * (math.sqrt(16 * delta + 1) + 1) / (16 * delta)))
    return (1 + 2 * math.sqrt(2) * c * noise) / (2 * noise**2)
