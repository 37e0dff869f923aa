"""The same plan by every accountant that is installed: independent checks of a stated ε.

No library is needed to run. Conventions differ, so each answer says how the library read the plan
and whether its ε is exact, an upper bound, or refused, with the reason.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dprlhf.privacy import accounting
from dprlhf.privacy.accounting import Mechanism, single_noise
from dprlhf.privacy.partitions.base import round_noise

Kind = Literal["exact", "upper bound", "cannot", "not installed"]


@dataclass(frozen=True)
class Answer:
    """What one accountant says of a plan."""

    accountant: str  # Library and method
    kind: Kind
    epsilon: float | None = None  # The library's ε, an upper bound; None where it has none
    lower: float | None = None
    note: str = ""  # How the library read the plan, or why it cannot


class CannotError(Exception):
    """Raised by an accountant that has no statement for a plan; its text is the reason."""


Accountant = Callable[[Mechanism, float], Answer]


def this_one(mechanism: Mechanism, delta: float) -> Answer:
    """Return the ε that this package states."""
    cost = accounting.epsilon(mechanism, delta)
    close = cost.epsilon - cost.epsilon_lower <= 5e-3 * cost.epsilon
    kind: Kind = "exact" if close else "upper bound"
    return Answer("dprlhf", kind, cost.epsilon, cost.epsilon_lower, cost.accountant)


def google_analytic(mechanism: Mechanism, delta: float) -> Answer:
    """Return dp-accounting's analytic Gaussian; a disjoint partition is one Gaussian release."""
    import dp_accounting

    _needs_one_gaussian(mechanism)
    found = float(dp_accounting.get_epsilon_gaussian(single_noise(mechanism), delta))
    return Answer("dp-accounting, analytic Gaussian", "exact", found, None, _one(mechanism))


def google_pld(mechanism: Mechanism, delta: float) -> Answer:
    """Return dp-accounting's privacy loss distribution, which rounds losses up."""
    name = "dp-accounting, privacy loss distribution"
    found = _google(mechanism, delta, pld=True)
    if mechanism.spec.independent_rounds:
        note = "Poisson sampling, on the library's own grid"
        return Answer(name, "upper bound", found, None, note)
    return Answer(name, "upper bound", found, None, _one(mechanism))


def google_rdp(mechanism: Mechanism, delta: float) -> Answer:
    """Return dp-accounting's Rényi accountant."""
    found = _google(mechanism, delta, pld=False)
    return Answer("dp-accounting, Rényi", "upper bound", found, None, "converted from Rényi orders")


def opacus_prv(mechanism: Mechanism, delta: float) -> Answer:
    """Return the middle of opacus' PRV accountant's interval (error 0.1% of ε)."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [_as_samples(mechanism)]
    error = max(1e-3 * accounting.epsilon(mechanism, delta).epsilon, 2e-4)
    shares = {"eps_error": error, "delta_error": delta / 1000}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = accountant._get_dprv(**shares)
        lower, _, upper = losses.compute_epsilon(delta, shares["delta_error"], error)
    note = f"both ends of its interval, {2 * error:.2g} wide; a removed user's side"
    return Answer("opacus, PRV", "exact", float(upper), float(lower), note)


def opacus_rdp(mechanism: Mechanism, delta: float) -> Answer:
    """Return opacus' Rényi accountant."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [_as_samples(mechanism)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = float(accountant.get_epsilon(delta))
    return Answer("opacus, Rényi", "upper bound", found, None, "converted from Rényi orders")


def feldman_shenfeld(mechanism: Mechanism, delta: float) -> Answer:
    """Return pld-accounting's bracket for random allocation (arXiv 2602.17284)."""
    _needs_allocation(mechanism)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that numba is missing, for one
        from PLD_accounting import gaussian_allocation_epsilon_range

        upper, lower = gaussian_allocation_epsilon_range(
            delta=delta,
            sigma=round_noise(mechanism),
            num_steps=mechanism.rounds,
            num_selected=mechanism.participations,
        )
    note = "both sides; its own bracket"
    return Answer("pld-accounting", "upper bound", float(upper), float(lower), note)


def opake(mechanism: Mechanism, delta: float) -> Answer:
    """Return the ε of opake-accounting, a port of Google's distributions to Rust."""
    # Only its compiled module is loaded: the Python package around it needs the rest of opake.
    native, times = _opake_module(), mechanism.rounds
    # The default grid takes minutes for random allocation.
    config = native.DiscretizationConfig(discretization=5e-3)
    z, k = round_noise(mechanism), mechanism.participations
    if mechanism.spec.disjoint:
        found, note = native.gaussian_pld(single_noise(mechanism), config), _one(mechanism)
    elif mechanism.spec.independent_rounds:
        base = native.gaussian_pld(z, native.DiscretizationConfig())
        found = native.poisson_pld(base, k / times).self_compose(times)
        note = "its Poisson sampling, composed over the rounds"
    else:
        _needs_allocation(mechanism)
        found = native.random_allocation_gaussian_pld(z, times, k, config)
        note = "k out of T, as k blocks; losses on a grid of 0.005"
    return Answer("opake-accounting", "upper bound", float(found.epsilon_at(delta)), None, note)


ACCOUNTANTS: dict[str, tuple[str, Accountant]] = {
    "dp-accounting, analytic Gaussian": ("dp_accounting", google_analytic),
    "dp-accounting, privacy loss distribution": ("dp_accounting", google_pld),
    "dp-accounting, Rényi": ("dp_accounting", google_rdp),
    "opacus, PRV": ("opacus", opacus_prv),
    "opacus, Rényi": ("opacus", opacus_rdp),
    "pld-accounting": ("PLD_accounting", feldman_shenfeld),
    "opake-accounting": ("opake", opake),
}
"""Every other accountant that is known here: the package that it needs, and the function."""


def answers(mechanism: Mechanism, delta: float) -> list[Answer]:
    """Return what this package and every other accountant say of a plan, this package first."""
    found = [this_one(mechanism, delta)]
    correlated = mechanism.bands > 1 and not mechanism.spec.disjoint
    for name, (package, ask) in ACCOUNTANTS.items():
        if correlated:
            found.append(Answer(name, "cannot", note="no correlated noise on random allocation"))
            continue
        if importlib.util.find_spec(package) is None:
            found.append(Answer(name, "not installed", note=f"the package {package}"))
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(ask(mechanism, delta))
        except CannotError as reason:
            found.append(Answer(name, "cannot", note=str(reason)))
        except Exception as error:  # another library's: its failure must not hide the others
            found.append(Answer(name, "cannot", note=f"{type(error).__name__}: {error}"))
    return found


def _one(mechanism: Mechanism) -> str:
    return f"one Gaussian with noise multiplier {single_noise(mechanism):.6g}"


def _needs_one_gaussian(mechanism: Mechanism) -> None:
    if not mechanism.spec.disjoint:
        raise CannotError(f"one Gaussian is not partition {mechanism.partition}")


def _needs_allocation(mechanism: Mechanism) -> None:
    if mechanism.partition != "random-allocation":
        raise CannotError(f"made for random allocation, not for {mechanism.partition}")
    if mechanism.adjacency == "replace-one":
        raise CannotError("no random allocation under replace-one")


def _google(mechanism: Mechanism, delta: float, *, pld: bool) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    if mechanism.partition == "random-allocation":
        raise CannotError("this version has no event for random allocation")
    z = round_noise(mechanism)
    event: Any = dp_accounting.GaussianDpEvent(
        single_noise(mechanism) if mechanism.spec.disjoint else z
    )
    if mechanism.spec.independent_rounds:
        rate = mechanism.participations / mechanism.rounds
        sampled = dp_accounting.PoissonSampledDpEvent(rate, event)
        event = dp_accounting.SelfComposedDpEvent(sampled, mechanism.rounds)
    accountant = PLDAccountant() if pld else RdpAccountant()
    return float(accountant.compose(event).get_epsilon(delta))


def _as_samples(mechanism: Mechanism) -> tuple[float, float, int]:
    """Return noise, sampling rate and number of rounds of a plan as Poisson sampling."""
    if mechanism.spec.disjoint:
        return single_noise(mechanism), 1.0, 1
    if not mechanism.spec.independent_rounds:
        raise CannotError("knows Poisson sampling and all users in each round only")
    rate = mechanism.participations / mechanism.rounds
    return round_noise(mechanism), rate, mechanism.rounds


def _opake_module() -> Any:
    spec = importlib.util.find_spec("opake.api.accounting.core")
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in Path(place).glob("opake_accounting*.so")]
    if not files:
        raise CannotError("opake is installed without opake-accounting")
    found = importlib.util.spec_from_file_location("opake_accounting", files[0])
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
