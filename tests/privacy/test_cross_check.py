"""The published test vectors, and what other accountants say of the same plans."""

import json
from pathlib import Path
from typing import Any

import pytest

from dprlhf.privacy.accounting import Mechanism, epsilon
from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.privacy.risk import risk
from helpers import accountants

VECTORS = json.loads((Path(__file__).parents[2] / "docs/vectors.json").read_text())["vectors"]
DELTA = 1e-5


def mechanism_of(vector: dict[str, Any]) -> Mechanism:
    names = ("noise_multiplier", "rounds", "partition", "adjacency", "participations")
    return Mechanism(
        **{name: vector[name] for name in names}, releases_per_round=vector["releases_per_round"]
    )


def quick(vector: dict[str, Any]) -> bool:
    return vector["partition"] != "poisson" and vector["participations"] == 1


def check(vector: dict[str, Any]) -> None:
    found = epsilon(mechanism_of(vector), vector["delta"])
    assert found.epsilon == pytest.approx(vector["epsilon"], rel=1e-6)
    if "reference" in vector:
        assert found.epsilon == pytest.approx(vector["reference"], rel=5e-3)
    if "lower" in vector:
        assert vector["lower"] <= found.epsilon <= vector["upper"] * 1.001


def test_the_vectors_cover_every_partition_and_adjacency() -> None:
    assert len(VECTORS) >= 60
    assert {v["partition"] for v in VECTORS} == {
        "random-allocation", "fixed", "stream", "poisson",
    }  # fmt: skip
    assert {v["adjacency"] for v in VECTORS} == {"zero-out", "add-remove", "replace-one"}
    assert {v["releases_per_round"] for v in VECTORS} == {1, 2, 4}
    assert all(v["confirmed_by"] for v in VECTORS)


@pytest.mark.parametrize("vector", [v for v in VECTORS if quick(v)], ids=str)
def test_vectors_are_reproduced(vector: dict[str, Any]) -> None:
    check(vector)


@pytest.mark.parametrize("vector", [v for v in VECTORS if quick(v)][::8], ids=str)
def test_risks_of_vectors_are_reproduced(vector: dict[str, Any]) -> None:
    found = risk([mechanism_of(vector)], vector["delta"])
    assert found.best_guess == pytest.approx(vector["risk"]["best_guess"], rel=1e-4)
    assert found.tpr_at_fpr == pytest.approx(vector["risk"]["tpr_at_fpr"], rel=1e-4)
    assert found.gdp_mu == pytest.approx(vector["risk"]["gdp_mu"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("vector", [v for v in VECTORS if not quick(v)], ids=str)
def test_vectors_of_composed_losses_are_reproduced(vector: dict[str, Any]) -> None:
    check(vector)


def test_four_releases_and_a_replacement_are_read_alike_by_all() -> None:
    """z = 4 with four releases and twice the sensitivity is one Gaussian with z = 1."""
    plan = Mechanism(4.0, 5, "fixed", "replace-one", releases_per_round=4)
    expected = gaussian_epsilon(1.0, DELTA)
    assert epsilon(plan, DELTA).epsilon == pytest.approx(expected)
    assert accountants.google_analytic(plan, DELTA) == pytest.approx(expected, rel=1e-6)
    assert expected * (1 - 1e-6) <= accountants.google_pld(plan, DELTA) <= 1.005 * expected
    lower, upper = accountants.opacus_prv(plan, DELTA)
    assert lower <= expected * (1 + 1e-6)
    assert expected * (1 - 1e-6) <= upper <= 1.005 * expected


@pytest.mark.slow
def test_poisson_sampling_is_read_alike_by_all() -> None:
    plan = Mechanism(2.0, 8, "poisson", participations=2, releases_per_round=4)
    ours = epsilon(Mechanism(1.0, 8, "poisson", participations=2), DELTA).epsilon
    assert ours * (1 - 1e-4) <= accountants.google_pld(plan, DELTA) <= 1.005 * ours
    lower, upper = accountants.opacus_prv(plan, DELTA)
    assert lower <= ours <= upper <= 1.005 * ours


@pytest.mark.slow
def test_random_allocation_lies_in_the_bracket_of_pld_accounting() -> None:
    plan = Mechanism(2.0, 8, releases_per_round=4)
    lower, upper = accountants.feldman_shenfeld(plan, DELTA)
    ours = epsilon(Mechanism(1.0, 8), DELTA).epsilon
    assert lower <= ours <= upper < 1.02 * lower
