"""Risk in words, against closed forms and Monte Carlo of the likelihood ratio."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm
from typer.testing import CliRunner

from dprlhf.cli.app import app
from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism
from dprlhf.privacy.max_guess import plan_within
from dprlhf.privacy.plan import make_plan
from dprlhf.privacy.risk import FALSE_POSITIVES, Risk, risk
from dprlhf.runs.card import percent
from helpers.risks import Floats, simulated

DELTA = 1e-5


def gaussian(mu: float, prior: float) -> tuple[float, list[float]]:
    """Return the best guess about a Gaussian of mean 0 or ``mu`` and its hit rates."""
    at = math.log((1 - prior) / prior) / mu + mu / 2
    best = prior * norm.sf(at - mu) + (1 - prior) * norm.cdf(at)
    return float(best), norm.cdf(norm.ppf(FALSE_POSITIVES) + mu).tolist()


@pytest.mark.parametrize("prior", [0.5, 0.1, 0.8, 0.999])
@pytest.mark.parametrize("people", [1, 2, 4, 101])
@pytest.mark.parametrize(("z", "releases"), [(0.4, 1), (1.0, 1), (3.0, 4), (40.0, 1)])
def test_disjoint_batches_are_a_gaussian(z, releases, people, prior):
    for adjacency, moves in (("zero-out", 1), ("replace-one", 2)):
        plan = Mechanism(z, 8, "fixed", adjacency, releases_per_round=releases)  # type: ignore[arg-type]
        found = risk([plan], DELTA, prior=prior, people=people)
        mu = people * moves * math.sqrt(releases) / z
        even, rates = gaussian(mu, 0.5)
        at_prior, _ = gaussian(mu, prior)
        at_prior = max(at_prior, gaussian(mu, 1 - prior)[0])
        assert even <= found.best_guess <= 1.001 * even
        assert at_prior <= found.best_guess_at_prior <= 1.001 * at_prior
        for exact, stated in zip(rates, found.tpr_at_fpr.values(), strict=True):
            assert exact <= stated <= 1.005 * exact
        assert mu * (1 - 1e-2) <= found.gdp_mu <= mu * (1 + 1e-8)


def test_several_runs_add_up() -> None:
    """Nine releases of one Gaussian at z = 3 are one at z = 1; disjoint runs are the dearest."""
    one = risk([Mechanism(1.0, 4, "fixed")], DELTA)
    nine = risk([Mechanism(3.0, 4, "fixed")], DELTA, times=[9])
    assert nine.best_guess == pytest.approx(one.best_guess, rel=1e-9)
    apart = [[True, False], [False, True]]
    two = [Mechanism(1.0, 4, "fixed"), Mechanism(3.0, 4, "fixed")]
    assert risk(two, DELTA, shared=apart) == one
    assert risk(two, DELTA).best_guess > one.best_guess


PLANS = [
    Mechanism(0.7, 8),
    Mechanism(1.3, 8, adjacency="replace-one"),
    Mechanism(0.9, 10, "poisson", participations=2),
]


SLOW = [
    Mechanism(0.8, 12, participations=3, releases_per_round=2),
    Mechanism(2.0, 8, adjacency="replace-one", participations=2),
]


@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(p, marks=pytest.mark.slow) for p in SLOW)])
def test_the_stated_risk_is_the_simulated_one(plan: Mechanism) -> None:
    found = risk([plan], DELTA)
    stated = [found.best_guess, *found.tpr_at_fpr.values()]
    for bound, (value, error) in zip(stated, simulated(plan, 100_000, 1), strict=True):
        assert value - 4 * error <= bound <= 1.01 * (value + 4 * error)
    # Negative control: with less noise the attack does better than what is stated for more.
    weaker = plan.with_noise(0.8 * plan.noise_multiplier)
    found_weaker = simulated(weaker, 100_000, 2)
    assert any(v - 4 * e > b for b, (v, e) in zip(stated, found_weaker, strict=True))


def test_people_together_cost_no_less_than_they_do_in_simulation() -> None:
    """Two users who draw their rounds independently, both in or both out."""
    z, rounds, draws = 1.5, 4, 200_000
    random = np.random.default_rng(3)
    pairs = np.array(list(itertools.product(range(rounds), repeat=2)))
    means = (pairs[:, :1] == range(rounds)).astype(float) + (pairs[:, 1:] == range(rounds))

    def log_ratio(seen: Floats) -> Floats:
        logs = (seen @ means.T - (means**2).sum(1) / 2) / z**2
        return np.asarray(logsumexp(logs, axis=1) - math.log(len(means)))

    noise = random.normal(0, z, (2, draws, rounds))
    taken = means[random.integers(len(means), size=draws)]
    right = ((log_ratio(noise[0] + taken) > 0).mean() + (log_ratio(noise[1]) <= 0).mean()) / 2
    stated = risk([Mechanism(z, rounds)], DELTA, people=2)
    assert right - 0.005 <= stated.best_guess <= 1.1 * right
    alone = risk([Mechanism(z, rounds)], DELTA)
    assert alone.best_guess < stated.best_guess
    assert alone.gdp_mu < stated.gdp_mu


@pytest.mark.slow
def test_correlated_noise() -> None:
    """Looser than the others, as its curve is certified by draws; never below its parts."""
    plan = Mechanism(1.3, 8, bands=2)
    found, single = risk([plan], DELTA), risk([Mechanism(1.3, 8, "fixed")], DELTA)
    least = risk([Mechanism(1.3, 8)], DELTA)  # correlation never helps
    for a, b, c in zip(*map(figures, (least, found, single)), strict=True):
        assert 0.999 * a <= b < c


def figures(one: Risk) -> list[float]:
    return [one.best_guess, one.best_guess_at_prior, *one.tpr_at_fpr.values(), one.gdp_mu]


@pytest.mark.parametrize("more", [
    {"noise_multiplier": 0.8}, {"adjacency": "replace-one"},
    pytest.param({"participations": 2}, marks=pytest.mark.slow),
    {"releases_per_round": 2}, {"rounds": 4}, {"partition": "fixed"},
])  # fmt: skip
def test_more_is_released_more_is_risked(more: dict[str, Any]) -> None:
    plan = Mechanism(1.0, 8)
    found = risk([plan], DELTA, prior=0.6), risk([Mechanism(**vars(plan) | more)], DELTA, prior=0.6)
    assert all(a <= b for a, b in zip(*map(figures, found), strict=True))
    assert found[0].best_guess < found[1].best_guess


@pytest.mark.parametrize(
    ("guess", "changes"),
    [
        (0.51, {"partition": "fixed"}),
        (0.6, {}),
        (0.9, {"partition": "poisson"}),
        pytest.param(0.6, {"participations": 2}, marks=pytest.mark.slow),
        pytest.param(0.6, {"bands": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plan_for_a_guess_has_the_least_noise_that_keeps_to_it(guess, changes):
    plan = plan_within(guess, users=100, rounds=8, delta=DELTA, **changes)
    assert risk([plan.mechanism], DELTA).best_guess <= guess
    less = plan.mechanism.with_noise(
        plan.noise_multiplier / (1.015 if "bands" in changes else 1.005)
    )
    assert risk([less], DELTA).best_guess > guess
    same = make_plan(
        users=100, rounds=8, delta=DELTA, noise_multiplier=plan.noise_multiplier, **changes
    )
    assert same == plan


@pytest.mark.parametrize("guess", [0.5, 0.500001, 1.0, math.nan])
def test_a_guess_without_a_plan_is_refused(guess: float) -> None:
    with pytest.raises(DprlhfError, match=r"max_guess must be above 0\.50001 and below 1"):
        plan_within(guess, users=100, rounds=8, delta=DELTA)


@pytest.mark.parametrize("partition", ["random-allocation", "fixed", "poisson"])
@pytest.mark.parametrize("z", [1e-200, 1e-3, 0.05, 1e9, math.inf])
def test_any_noise_has_bounds(z: float, partition: Any) -> None:
    found = risk([Mechanism(z, 4, partition)], DELTA, prior=0.3, people=3)
    assert all(math.isfinite(value) for value in figures(found))
    assert 0.5 <= found.best_guess <= 1
    assert 0.7 <= found.best_guess_at_prior <= 1
    assert all(float(fpr) <= tpr <= 1 for fpr, tpr in found.tpr_at_fpr.items())
    if z >= 1e9:
        assert found.best_guess < 0.50001


def test_shares_are_rounded_up() -> None:
    for share in np.random.default_rng(4).random(1000):
        assert share <= float(percent(share)) / 100 * (1 + 1e-15) <= share + 1e-2 * share


def test_the_command() -> None:
    options = ["privacy", "risk", "--rounds=16", "--noise-multiplier=0.692", "--delta=1e-5"]
    shown = CliRunner().invoke(app, [*options, "--prior=0.2", "--people=2"])
    assert shown.exit_code == 0
    assert "all 2 people or none" in shown.output
    answer = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert answer["best_guess"] == pytest.approx(0.605, abs=1e-3)  # (e^4)/(1 + e^4) is 0.982
    assert set(answer["tpr_at_fpr"]) == {"0.001", "0.01", "0.1"}
    assert 0 < answer["gdp_mu"] < 1 / 0.692
    options = ["privacy", "noise", "--users=99", "--rounds=16", "--delta=1e-5", "--json"]
    asked = json.loads(CliRunner().invoke(app, [*options, "--max-guess=0.605"]).output)
    assert asked["best_guess"] <= 0.605
    assert asked["noise_multiplier"] == pytest.approx(0.692, abs=2e-3)
    assert "give one of" in str(CliRunner().invoke(app, options).exception)
    options = ["privacy", "risk", "--rounds=16"]
    of_runs = str(CliRunner().invoke(app, [*options, "run"]).exception)
    assert "risk: --rounds is that of the runs" in of_runs
    assert "give a run folder" in str(CliRunner().invoke(app, options).exception)
