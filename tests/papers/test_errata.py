"""The printed formulas, and where they fail (errata of the source papers)."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from dprlhf.papers import errata
from dprlhf.privacy.accounting import Mechanism, epsilon


def exact_delta(noise: float, eps: float) -> float:
    """Delta of one Gaussian from its two tail probabilities; no shared code."""
    return float(
        norm.cdf(0.5 / noise - eps * noise) - math.exp(eps) * norm.cdf(-0.5 / noise - eps * noise)
    )


@pytest.mark.parametrize(("claimed", "spent"), [(1, 1.098), (3, 3.756), (5, 6.825)])
def test_he_zhou_theorem_1_spends_more_than_it_claims(claimed: float, spent: float) -> None:
    shape = {"reward_bound": 2.0, "score_bound": 3.0, "batch": 50}
    sigma = errata.he_zhou_theorem_1_noise(claimed, 1e-5, **shape)
    assert sigma**2 == pytest.approx(16 * math.log(1.25e5) * 2**2 * 3**2 / (50**2 * claimed**2))
    z = sigma / errata.he_zhou_sensitivity(**shape)
    assert exact_delta(z, claimed) > 1e-5  # the printed version fails
    assert errata.he_zhou_theorem_1_epsilon_spent(claimed, 1e-5) == pytest.approx(spent, abs=5e-4)
    assert exact_delta(z, spent) == pytest.approx(1e-5, rel=0.02)


@pytest.mark.parametrize("claimed", [0.3, 1.0, 5.0])
def test_the_corrected_noise_keeps_the_claim(claimed: float) -> None:
    shape = {"reward_bound": 2.0, "score_bound": 3.0, "batch": 50}
    needed = errata.he_zhou_noise_needed(claimed, 1e-5, **shape)
    z = needed / errata.he_zhou_sensitivity(**shape)
    assert 1e-5 * (1 - 1e-5) < exact_delta(z, claimed) <= 1e-5 * (1 + 1e-9)


def test_the_constant_32_mends_theorem_1_only_below_one() -> None:
    # 32 in place of 16 is the classical formula: enough below epsilon 1, too little at 20.
    for claimed, enough in [(0.5, True), (20.0, False)]:
        sigma = math.sqrt(2) * errata.he_zhou_theorem_1_noise(
            claimed, 1e-5, reward_bound=1, score_bound=1, batch=1
        )
        assert (exact_delta(sigma / 4, claimed) <= 1e-5) is enough


def test_rio_b1_formulas() -> None:
    assert errata.rio_b1_classical_epsilon(1.0, 1e-5) == pytest.approx(4.84, abs=5e-3)
    assert errata.rio_b1_zhao_epsilon(1.0, 1e-5) == pytest.approx(5.00, abs=5e-3)
    # The second is valid but loose (exact 4.377), and solves Zhao et al.'s noise for epsilon.
    assert exact_delta(1.0, errata.rio_b1_zhao_epsilon(1.0, 1e-5)) < 1e-6
    eps = errata.rio_b1_zhao_epsilon(0.7, 1e-4)
    c = math.sqrt(math.log(2 / (math.sqrt(16e-4 + 1) - 1)))
    assert (c + math.sqrt(c * c + eps)) / (eps * math.sqrt(2)) == pytest.approx(0.7, rel=1e-12)


def test_rio_dosing_epsilons_are_the_first_formula_out_of_its_range() -> None:
    for z, printed, exact in [(0.1, 38, 91.8), (0.5, 8, 10.0)]:
        assert round(errata.rio_b1_classical_epsilon(z, 1e-3)) == printed
        true = epsilon(Mechanism(z, 1, "stream", "zero-out"), 1e-5).epsilon
        assert true == pytest.approx(exact, abs=0.05)
        assert exact_delta(z, errata.rio_b1_classical_epsilon(z, 1e-5)) > 1e-5


def test_rio_rlhf_noise_is_no_privacy() -> None:
    cost = epsilon(Mechanism(0.01, 1, "stream", "zero-out"), 1e-5).epsilon
    assert cost == pytest.approx(5425, abs=1)
    assert errata.rio_b1_classical_epsilon(0.01, 1e-5) < 500  # what the first formula would say
