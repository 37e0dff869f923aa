"""The terms of earlier runs: what a record of one must hold for the total to be right."""

from __future__ import annotations

from typing import Any

import pytest

from dprlhf.privacy import correlated_allocation
from dprlhf.privacy.accounting import Mechanism
from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.runs.earlier import Earlier, Record, cost_terms, total, total_of


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {"users": 64, "rounds": 4, "delta": 1e-5, "noise_multiplier": 2.0}
    return make_plan(**(values | changes))


def record(terms: dict[str, Any]) -> Record:
    return Record("a", "a", "rl", None, 1e-5, cost_terms(terms), [])


@pytest.mark.slow
def test_bands_are_in_a_record_only_where_the_cost_depends_on_them() -> None:
    allocated = plan(bands=4)
    assert cost_terms(allocated.terms())["bands"] == 4
    assert cost_terms(allocated.terms()) == cost_terms(vars(allocated.mechanism))
    assert Mechanism(**cost_terms(allocated.terms())) == allocated.mechanism
    # Records of older runs had none, and a continued run's record must equal the one it began with.
    for without in (plan(), plan(bands=4, partition="fixed")):
        terms = without.terms()
        assert "bands" not in cost_terms(terms)
        del terms["bands"]
        assert cost_terms(terms) == cost_terms(without.terms())


def test_the_total_counts_an_earlier_run_with_its_correlation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(correlated_allocation, "_DRAWS", 2**15)
    correlated_allocation.epsilon.cache_clear()
    allocated = plan(bands=4)
    alone = total_of([record(allocated.terms())])
    assert alone.epsilon == pytest.approx(allocated.guarantee.epsilon)
    assert alone.epsilon > total_of([record(plan().terms())]).epsilon * 1.2
    both = total(allocated, Earlier([record(allocated.terms())]))
    assert alone.epsilon < both.epsilon <= gaussian_epsilon(2.0 / 2**0.5, 1e-5) * (1 + 1e-6)
    correlated_allocation.epsilon.cache_clear()
