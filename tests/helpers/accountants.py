"""The same plan by the accountants of other libraries, whose conventions differ.

Each function raises a ``ValueError`` for a plan of which its library has no statement.
"""

import warnings
from typing import Any

import dp_accounting
from dp_accounting.pld import PLDAccountant

from dprlhf.privacy.accounting import Mechanism, epsilon, single_noise
from dprlhf.privacy.partitions.base import round_noise


def google_analytic(mechanism: Mechanism, delta: float) -> float:
    """Return ε by dp-accounting's analytic Gaussian; disjoint batches are one Gaussian."""
    if not mechanism.spec.disjoint:
        raise ValueError(f"one Gaussian is not partition {mechanism.partition}")
    return float(dp_accounting.get_epsilon_gaussian(single_noise(mechanism), delta))


def google_pld(mechanism: Mechanism, delta: float) -> float:
    """Return an upper bound on ε by dp-accounting's losses, rounded up on its own grid."""
    noise, rate, rounds = _as_samples(mechanism)
    sampled = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    event = dp_accounting.SelfComposedDpEvent(sampled, rounds)
    return float(PLDAccountant().compose(event).get_epsilon(delta))


def opacus_prv(mechanism: Mechanism, delta: float) -> tuple[float, float]:
    """Return both ends of the interval of Opacus' PRV accountant (error 0.1% of ε)."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [_as_samples(mechanism)]
    error = max(1e-3 * epsilon(mechanism, delta).epsilon, 2e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = accountant._get_dprv(eps_error=error, delta_error=delta / 1000)
        lower, _, upper = losses.compute_epsilon(delta, delta / 1000, error)
    return float(lower), float(upper)


def feldman_shenfeld(mechanism: Mechanism, delta: float) -> tuple[float, float]:
    """Return pld-accounting's bracket for random allocation (arXiv 2602.17284)."""
    if mechanism.partition != "random-allocation" or mechanism.adjacency == "replace-one":
        raise ValueError("made for random allocation, and not under replace-one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that numba is missing, for one
        from PLD_accounting import gaussian_allocation_epsilon_range

        found: Any = gaussian_allocation_epsilon_range(
            delta=delta, sigma=round_noise(mechanism), num_steps=mechanism.rounds,
            num_selected=mechanism.participations,
        )  # fmt: skip
    return float(found[1]), float(found[0])


def _as_samples(mechanism: Mechanism) -> tuple[float, float, int]:
    """Return noise, sampling rate and number of rounds of a plan as Poisson sampling."""
    if mechanism.spec.disjoint:
        return single_noise(mechanism), 1.0, 1
    if not mechanism.spec.independent_rounds:
        raise ValueError("knows Poisson sampling and all users in each round only")
    rate = mechanism.participations / mechanism.rounds
    return round_noise(mechanism), rate, mechanism.rounds
