"""The plan: one specification that noise, partition and accounting agree on."""

import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, epsilon, gaussian_epsilon
from dprlhf.privacy.plan import NO_PRIVACY, Plan, make_plan

ALL: list[dict[str, Any]] = [
    {"partition": "random-allocation"},
    {"partition": "random-allocation", "adjacency": "zero-out"},
    {"partition": "random-allocation", "adjacency": "replace-one"},
    {"partition": "random-allocation", "participations": 2},
    {"partition": "fixed"},
    {"partition": "fixed", "adjacency": "replace-one"},
    {"partition": "stream"},
    {"partition": "stream", "adjacency": "replace-one"},
    {"partition": "poisson"},
]


def ask(**changes: Any) -> Plan:
    values: dict[str, Any] = {"users": 1003, "rounds": 8, "delta": 1e-5} | changes
    if "epsilon" not in values and "noise_multiplier" not in values:
        values["noise_multiplier"] = 1.0
    return _made(tuple(values.items()))


@functools.cache
def _made(values: tuple[tuple[str, Any], ...]) -> Plan:
    return make_plan(**dict(values))


def test_noise_sensitivity_and_divisor_by_hand() -> None:
    p = ask(clip_norm=0.5, noise_multiplier=1.25)
    assert (p.noise_std, p.sensitivity, p.expected_batch_size) == (0.625, 0.5, 1003 / 8)
    assert p.noise_to_clip_ratio(400) == pytest.approx(1.25 * 20 / (1003 / 8), rel=1e-15)
    assert p.adjacency == "zero-out"
    assert ask(partition="poisson", epsilon=math.inf).adjacency == "zero-out"
    p = ask(clip_norm=0.5, partition="fixed", adjacency="replace-one")
    assert (p.noise_std, p.sensitivity, p.expected_batch_size) == (
        0.5,
        1.0,
        125.0,
    )  # ⌊1003/8⌋ slots
    assert ask(partition="stream").expected_batch_size == 125.0
    assert ask(partition="stream").adjacency == "zero-out"
    assert ask(participations=4, epsilon=math.inf).expected_batch_size == 4 * 1003 / 8
    baseline = ask(partition="poisson", participations=3, epsilon=math.inf)
    assert baseline.expected_batch_size == pytest.approx(3 * 1003 / 8)


@pytest.mark.slow
@pytest.mark.parametrize("terms", ALL, ids=str)
def test_the_guarantee_is_that_of_the_planned_mechanism(terms: dict[str, Any]) -> None:
    p = ask(noise_multiplier=1.0, **terms)
    mechanism = Mechanism(1.0, 8, p.partition, p.adjacency, p.participations)
    assert p.guarantee == epsilon(mechanism, 1e-5)
    assert p.noise_multiplier == 1.0
    assert p.private
    if p.participations == 1 and p.partition != "poisson":
        # Hiding the batches only helps: one Gaussian at the true sensitivity costs no less.
        one = gaussian_epsilon(p.clip_norm / p.sensitivity, 1e-5)
        assert p.guarantee.epsilon <= one * (1 + 1e-9)
        assert (p.guarantee.epsilon < 0.99 * one) == (p.partition == "random-allocation")


@pytest.mark.slow
@pytest.mark.parametrize("terms", ALL, ids=str)
@pytest.mark.parametrize("off", [{"epsilon": math.inf}, {"noise_multiplier": 0}], ids=str)
def test_a_baseline_changes_nothing_but_the_noise(terms, off):
    p, private = ask(**off, **terms), ask(**terms)
    assert (p.noise_multiplier, p.noise_std, p.private) == (0.0, 0.0, False)
    assert p.guarantee.epsilon == p.guarantee.epsilon_lower == math.inf
    assert p.guarantee.accountant == NO_PRIVACY
    mechanism = replace(p.mechanism, noise_multiplier=1.0)
    assert replace(p, mechanism=mechanism, guarantee=private.guarantee) == private


def test_a_baseline_may_leave_the_clip_norm_out() -> None:
    p = ask(epsilon=math.inf, clip_norm=math.inf)
    assert p.noise_std == 0.0  # not 0 · ∞
    assert p.noise_to_clip_ratio(10) == 0.0


@pytest.mark.parametrize("off", [{}, {"epsilon": math.inf, "clip_norm": math.inf}], ids=str)
def test_terms_are_json_and_hold_the_whole_plan(off: dict[str, Any]) -> None:
    p = ask(**off)
    terms = p.terms()
    assert json.loads(json.dumps(terms, allow_nan=False)) == terms
    assert {
        "users": 1003, "rounds": 8, "partition": "random-allocation", "adjacency": "zero-out",
        "participations": 1, "clip_norm": "infinity" if off else 1.0,
        "noise_multiplier": p.noise_multiplier, "divisor": 1003 / 8,
        "epsilon": "infinity" if off else p.guarantee.epsilon,
        "epsilon_lower": "infinity" if off else p.guarantee.epsilon_lower, "delta": 1e-5,
        "accountant": p.guarantee.accountant, "releases_per_round": 1, "bands": 1,
    } == terms  # fmt: skip


@pytest.mark.parametrize("terms", [*ALL, {"epsilon": math.inf}], ids=str)
def test_a_continued_run_keeps_noise_and_epsilon_to_the_last_digit(terms: dict[str, Any]) -> None:
    """Another processor rounds differently, and the ledger compares exactly."""
    first = ask(**terms)
    opened = json.loads(json.dumps(first.terms()))
    off = 1 + 1e-12
    guarantee = replace(
        first.guarantee,
        epsilon=first.guarantee.epsilon * off,
        epsilon_lower=first.guarantee.epsilon_lower / off,
    )
    mechanism = first.mechanism.with_noise(first.noise_multiplier * off)
    again = replace(first, mechanism=mechanism, guarantee=guarantee)
    assert again == first or again.terms() != first.terms()
    assert again.continued(opened).terms() == first.terms()
    assert again.continued({}) == again


@pytest.mark.parametrize("name", ["noise_multiplier", "epsilon", "epsilon_lower"])
def test_other_noise_or_another_epsilon_is_no_rounding(name: str) -> None:
    plan = ask()
    opened = plan.terms()
    for value in (opened[name] * (1 + 1e-5), opened[name] * (1 - 1e-5), "infinity", None, "1"):
        assert plan.continued(opened | {name: value}) == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"users": 7}, "7 users cannot fill 8 rounds: lower rounds to 7"),
        ({"users": 0}, "no users"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "exactly one of epsilon and noise_multiplier"),
        ({"epsilon": None}, "exactly one of epsilon and noise_multiplier"),
        ({"clip_norm": 0.0}, "clip_norm must be a positive number, not 0.0"),
        ({"clip_norm": math.nan}, "clip_norm must be a positive number"),
        ({"clip_norm": math.inf}, "clip_norm must be a positive number, not inf"),
        ({"epsilon": math.inf, "clip_norm": 0.0}, "clip_norm must be a positive number"),
        ({"epsilon": 0.0}, "epsilon must be a positive number"),
        ({"epsilon": math.nan}, "epsilon must be a positive number"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be above 0"),
        ({"delta": 1.0}, "delta must be above 0 and below 1"),
        ({"epsilon": math.inf, "delta": 0.0}, "delta must be above 0 and below 1"),
    ],
    ids=str,
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DprlhfError, match=message) as caught:
        ask(**changes)
    assert "\n" not in str(caught.value)


def test_the_noise_follows_the_clip_norm_and_the_cost_does_not() -> None:
    small, large = ask(epsilon=1.0, clip_norm=0.1), ask(epsilon=1.0, clip_norm=10.0)
    assert large.noise_std == pytest.approx(100 * small.noise_std, rel=1e-14)
    assert large.guarantee == small.guarantee
    assert large.noise_to_clip_ratio(9) == small.noise_to_clip_ratio(9)


def test_a_plan_warns_of_its_delta_and_of_noise_that_leads() -> None:
    few = ask(epsilon=1.0, users=100, delta=0.02)
    assert few.noise_to_clip_ratio(10_000) > 1
    assert [w.partition(" ")[0] for w in few.warnings(10_000)] == ["delta", "noise"]
    many = ask(epsilon=8.0, users=100_000)
    assert many.noise_to_clip_ratio(10) < 1
    assert many.warnings(10) == []
    baseline = ask(epsilon=math.inf, users=100, delta=0.02)
    assert baseline.warnings(10_000) == []


@pytest.mark.parametrize("clip_norm", [1e308, 1e-320])
def test_a_clip_norm_whose_noise_overflows_or_vanishes_is_refused(clip_norm: float) -> None:
    """Noise that rounds to zero would be no noise."""
    for noise in (4.0, 1e-3):
        if not 1e-300 < noise * clip_norm < 1e100:
            with pytest.raises(DprlhfError, match="is no ordinary number"):
                ask(noise_multiplier=noise, clip_norm=clip_norm, partition="fixed")
    ask(epsilon=math.inf, clip_norm=clip_norm)  # a baseline has none


@pytest.mark.parametrize("partition", ["fixed", "random-allocation"])
def test_a_plan_for_an_epsilon_counts_all_releases(partition: Any) -> None:
    plan = ask(epsilon=4.0, partition=partition, releases_per_round=4)
    one = ask(epsilon=4.0, partition=partition)
    assert plan.noise_multiplier == pytest.approx(2 * one.noise_multiplier, rel=1e-3)
    assert plan.guarantee == epsilon(plan.mechanism, plan.guarantee.delta)
