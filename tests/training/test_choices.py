"""The choice of rounds and noise: its figures against simulations, and what it leaves out."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dprlhf import DprlhfError
from dprlhf.privacy import max_guess
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.recipe import make_recipe
from dprlhf.training import build
from dprlhf.training.choices import (
    Candidate,
    Choice,
    Signal,
    best_choices,
    cosines,
    guessed_noise,
    is_slow,
    kappa,
    noise_rows,
    planner,
)
from helpers.recipes import recipe_settings

ONE_PASS = Candidate("random-allocation", 8, 1, 1, 2)


def plan_of(noise: float = 1.0, **changes: Any) -> Plan:
    values = {"users": 400, "rounds": 8, "delta": 1e-5, "noise_multiplier": noise} | changes
    return make_plan(**values)


class TestFigures:
    @pytest.mark.parametrize("momentum", [0.0, 0.6])
    @pytest.mark.parametrize("bands", [1, 3])
    def test_cosines_of_simulated_releases(self, momentum: float, bands: int) -> None:
        """Releases with known mean, sampling error and noise, averaged as an optimizer does."""
        plan = plan_of(0.5, partition="fixed", bands=bands)
        signal = Signal(norm=0.1, spread=0.6, dimension=300)
        random = np.random.default_rng(0)
        runs, rounds, p, m = 200, plan.rounds, signal.dimension, plan.expected_batch_size
        mean = np.zeros(p)
        mean[0] = signal.norm
        sampling = random.normal(0, math.sqrt(signal.spread / m / p), (runs, rounds, p))
        draws = random.normal(0, plan.noise_multiplier / m, (runs, rounds, p))
        releases = mean + sampling + np.einsum("ts,rsp->rtp", noise_rows(plan), draws)
        buffer, found = np.zeros((runs, p)), []
        for t in range(rounds):
            buffer = momentum * buffer + releases[:, t]
            found.append((buffer[:, 0] / np.linalg.norm(buffer, axis=1)).mean())
        assert np.array(found) == pytest.approx(cosines(plan, signal, momentum), rel=0.06)

    def test_kappa_of_correlated_noise_is_that_of_the_sum(self) -> None:
        plan = plan_of(1.0, partition="fixed", bands=8)
        draws = np.random.default_rng(1).normal(size=(20000, 8))
        assert kappa(plan) == pytest.approx((draws @ noise_rows(plan).T).sum(1).std(), rel=0.03)
        assert kappa(plan) < kappa(plan_of(1.0, partition="fixed"))

    @pytest.mark.parametrize("passes", [1, 2])
    def test_signal_to_noise_by_hand(self, passes: int) -> None:
        """The users count once: a second pass lowers κ, the noise over the signal."""
        plan = plan_of(1.5, participations=passes)
        candidate = replace(ONE_PASS, participations=passes)
        choice = Choice(candidate, plan, Signal(0.2, 0.5, 100), np.ones(8), 0.1)
        kappa_by_hand = 1.5 * math.sqrt(8) / passes
        assert choice.signal_to_noise == pytest.approx(400 * 0.2 / (kappa_by_hand * 10))
        assert choice.responses == 400 * 2 * passes


class TestCandidates:
    @pytest.mark.parametrize(("epsilon", "close"), [(0.3, 0.02), (1.0, 0.12), (4.0, 0.12)])
    @pytest.mark.parametrize("rounds", [4, 16])
    def test_the_guess_is_near_the_accountants_noise(self, rounds, epsilon, close):
        exact = make_plan(users=400, rounds=rounds, delta=1e-5, epsilon=epsilon)
        guess = guessed_noise(replace(ONE_PASS, rounds=rounds), epsilon, 1e-5)
        assert guess == pytest.approx(exact.noise_multiplier, rel=close)


class TestTheBest:
    """With a cost by hand: the guess of a candidate is off by its number of responses."""

    def choose(self, noises: dict[Candidate, float], **options: Any) -> tuple[list[Choice], int]:
        asked: list[Candidate] = []

        def cost(candidate: Candidate) -> Plan:
            asked.append(candidate)
            if candidate.bands > 1:
                raise DprlhfError("refused")
            return plan_of(noises[candidate], rounds=candidate.rounds)

        self.asked = asked
        return best_choices(
            noises, cost=cost, guess=lambda c: plan_of(0.9 * noises[c], rounds=c.rounds),
            rate=lambda c, plan: Choice(c, plan, Signal(0.1, 0.5, 10), np.ones(1), 0.1),
            rank=lambda choice: -choice.plan.noise_multiplier, slow=lambda c: c.participations > 1,
            **options,
        )  # fmt: skip

    def test_the_accountants_order_counts_and_the_hopeless_are_not_costed(self) -> None:
        noises = {
            replace(ONE_PASS, rounds=t): z for t, z in {4: 3.0, 5: 1.0, 6: 1.05, 7: 2}.items()
        }
        best, passed = self.choose(noises, show=2)
        assert [c.candidate.rounds for c in best] == [5, 6]
        assert passed == 0
        assert len(self.asked) == 2


@pytest.mark.slow
def test_several_passes_are_costed_fast_and_keep_within_epsilon() -> None:
    several = replace(ONE_PASS, participations=2)
    assert is_slow(several)
    cost, _ = planner(400, 1.0, 1e-5, adjacency=None, releases=1)
    plan = cost(several)
    least = make_plan(users=400, rounds=8, delta=1e-5, epsilon=1.0, participations=2)
    assert plan.guarantee.epsilon <= 1.0
    assert 1 <= plan.noise_multiplier / least.noise_multiplier < 1.03


def test_a_continued_run_keeps_the_noise_that_a_guess_was_given(monkeypatch):
    """The search for it may end elsewhere on another processor, by up to its tolerance."""
    recipe = make_recipe(recipe_settings(privacy={"max_guess": 0.6, "partition": "fixed"}))
    plan = build.plan_of(recipe, 100)
    found = max_guess.noise_multiplier
    monkeypatch.setattr(max_guess, "noise_multiplier", lambda *given: 1.001 * found(*given))
    assert build.plan_of(recipe, 100, plan.terms()) == plan
    assert build.plan_of(recipe, 100) != plan
