"""The published test vectors, and what other accountants say of the same plans."""

import json
from pathlib import Path
from typing import Any

import pytest

from dprlhf.privacy import cross_check
from dprlhf.privacy.accounting import Mechanism, epsilon
from dprlhf.privacy.cross_check import answers
from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.privacy.risk import risk

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
    said = {a.accountant: a for a in answers(plan, DELTA)}
    assert said["dprlhf"].epsilon == pytest.approx(expected)
    given = [a for a in said.values() if a.epsilon is not None]
    assert len(given) >= 6
    for answer in given:
        close = 5e-3 if answer.kind == "exact" else 0.2  # Rényi bounds are looser
        assert answer.epsilon is not None
        assert expected * (1 - 1e-6) <= answer.epsilon <= expected * (1 + close), answer
        assert answer.lower is None or answer.lower <= expected * (1 + 1e-6), answer
    assert said["pld-accounting"].kind == "cannot"
    assert "random allocation" in said["pld-accounting"].note


@pytest.mark.slow
def test_poisson_sampling_is_read_alike_by_all() -> None:
    plan = Mechanism(2.0, 8, "poisson", participations=2, releases_per_round=4)
    same = Mechanism(1.0, 8, "poisson", participations=2)
    ours = epsilon(same, DELTA).epsilon
    given = [a for a in answers(plan, DELTA) if a.epsilon is not None]
    assert len(given) >= 5
    for answer in given:
        assert answer.epsilon is not None
        assert (
            ours * (1 - 1e-4) <= answer.epsilon <= ours * (1.005 if answer.kind == "exact" else 1.4)
        )


@pytest.mark.slow
def test_random_allocation_lies_in_the_bracket_of_pld_accounting() -> None:
    plan = Mechanism(2.0, 8, releases_per_round=4)
    found = cross_check.feldman_shenfeld(plan, DELTA)
    ours = epsilon(Mechanism(1.0, 8), DELTA).epsilon
    assert found.lower is not None
    assert found.epsilon is not None
    assert found.lower <= ours <= found.epsilon < 1.02 * found.lower


def test_nobody_states_random_allocation_under_replace_one_for_less() -> None:
    """There an accountant that knows add-remove only must refuse, or it would state too little."""
    ours, *others = answers(Mechanism(1.0, 4, adjacency="replace-one"), DELTA)
    assert ours.epsilon is not None
    assert {a.kind for a in others} <= {"cannot", "not installed"}
    assert all(a.epsilon is None and a.note for a in others)
