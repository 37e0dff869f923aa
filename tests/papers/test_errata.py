"""Closed forms that the source papers print, and where they fall short of what they claim.

HZ is He & Zhou, arXiv 2510.21060; Rio is Rio et al., arXiv 2501.19080.
"""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from dprlhf.privacy.accounting import Mechanism, epsilon
from dprlhf.privacy.gaussian import gaussian_epsilon, gaussian_noise_multiplier

SENSITIVITY = 4.0
"""Replace-one sensitivity of HZ's averaged gradient in units of RG/m, since |advantage| ≤ 2R."""


def he_zhou_noise(claimed: float, delta: float) -> float:
    """σ of HZ Theorems 1 and 5 as printed, in units of RG/m: σ² = 16 ln(1.25/δ) / ε²."""
    return math.sqrt(16 * math.log(1.25 / delta)) / claimed


def rio_classical_epsilon(noise: float, delta: float) -> float:
    """Rio, appendix B.1, first formula: √(2 ln(1.25/δ)) / z, valid only where it is below 1."""
    return math.sqrt(2 * math.log(1.25 / delta)) / noise


def rio_zhao_epsilon(noise: float, delta: float) -> float:
    """Rio, appendix B.1, second formula (Zhao et al. 2019, Theorem 5): valid, and loose."""
    c = math.sqrt(math.log(2 / (math.sqrt(16 * delta + 1) - 1)))
    return (1 + 2 * math.sqrt(2) * c * noise) / (2 * noise**2)


def exact_delta(noise: float, eps: float) -> float:
    """Delta of one Gaussian from its two tail probabilities; no shared code."""
    return float(
        norm.cdf(0.5 / noise - eps * noise) - math.exp(eps) * norm.cdf(-0.5 / noise - eps * noise)
    )


@pytest.mark.parametrize(("claimed", "spent"), [(1, 1.098), (3, 3.756), (5, 6.825)])
def test_he_zhou_theorem_1_spends_more_than_it_claims(claimed: float, spent: float) -> None:
    z = he_zhou_noise(claimed, 1e-5) / SENSITIVITY
    assert exact_delta(z, claimed) > 1e-5  # the printed version fails
    assert gaussian_epsilon(z, 1e-5) == pytest.approx(spent, abs=5e-4)
    assert exact_delta(z, spent) == pytest.approx(1e-5, rel=0.02)
    enough = gaussian_noise_multiplier(claimed, 1e-5)
    assert 1e-5 * (1 - 1e-5) < exact_delta(enough, claimed) <= 1e-5 * (1 + 1e-9)


def test_the_constant_32_mends_theorem_1_only_below_one() -> None:
    # 32 in place of 16 is the classical formula: enough below epsilon 1, too little at 20.
    for claimed, enough in [(0.5, True), (20.0, False)]:
        sigma = math.sqrt(2) * he_zhou_noise(claimed, 1e-5)
        assert (exact_delta(sigma / SENSITIVITY, claimed) <= 1e-5) is enough


def test_rio_b1_formulas() -> None:
    assert rio_classical_epsilon(1.0, 1e-5) == pytest.approx(4.84, abs=5e-3)
    assert rio_zhao_epsilon(1.0, 1e-5) == pytest.approx(5.00, abs=5e-3)
    # The second is valid but loose (exact 4.377), and solves Zhao et al.'s noise for epsilon.
    assert exact_delta(1.0, rio_zhao_epsilon(1.0, 1e-5)) < 1e-6
    eps = rio_zhao_epsilon(0.7, 1e-4)
    c = math.sqrt(math.log(2 / (math.sqrt(16e-4 + 1) - 1)))
    assert (c + math.sqrt(c * c + eps)) / (eps * math.sqrt(2)) == pytest.approx(0.7, rel=1e-12)


def test_rio_dosing_epsilons_are_the_first_formula_out_of_its_range() -> None:
    for z, printed, exact in [(0.1, 38, 91.8), (0.5, 8, 10.0)]:
        assert round(rio_classical_epsilon(z, 1e-3)) == printed
        true = epsilon(Mechanism(z, 1, "stream", "zero-out"), 1e-5).epsilon
        assert true == pytest.approx(exact, abs=0.05)
        assert exact_delta(z, rio_classical_epsilon(z, 1e-5)) > 1e-5


def test_rio_rlhf_noise_is_no_privacy() -> None:
    cost = epsilon(Mechanism(0.01, 1, "stream", "zero-out"), 1e-5).epsilon
    assert cost == pytest.approx(5425, abs=1)
    assert rio_classical_epsilon(0.01, 1e-5) < 500  # what the first formula would say
