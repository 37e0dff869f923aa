"""The planner on a whole recipe: what it measures, what it chooses, and that no prompt is read."""

import contextlib
import zlib
from typing import Any
from unittest import mock

import pytest
from datasets import Dataset

from dprlhf import DprlhfError
from dprlhf.data.in_memory import InMemoryInputs, recipe_of
from dprlhf.data.public import Guides
from dprlhf.data.users import Users
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Recipe
from dprlhf.training.dry_run import dry_run
from dprlhf.training.planner import Facts, choose, measure, with_choice
from dprlhf.training.timing import seconds_a_round
from helpers.runs import ADAPTER, lower_case

PUBLIC = [f"public {i}" for i in range(160)]
USERS = [f"user {i} says" for i in range(120)]
RESPONSES = 8
ONE_PASS = RESPONSES * len(USERS)


def made(model: str, **changes: Any) -> tuple[Recipe, InMemoryInputs]:
    sources = InMemoryInputs(USERS, lower_case, PUBLIC)
    flat = {
        "model": model, "epsilon": 8.0, "rounds": 6, "learning_rate": 0.05,
        "policy__adapter": ADAPTER, "rollout__max_new_tokens": 4, "evaluation__prompts": 4,
        "rollout__responses": RESPONSES,
        **changes,
    }  # fmt: skip
    return recipe_of(None, (), flat, sources), sources


@pytest.fixture(scope="module")
def facts(model: str) -> Facts:
    return measure(*made(model), responses=[RESPONSES, 2 * RESPONSES], prompts=120)


class TestMeasure:
    @pytest.mark.slow
    def test_a_reward_that_teaches_nothing_is_not_planned_for(self, model: str) -> None:
        """Its gradients agree by chance alone, whichever sign their estimate has."""

        def arbitrary(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
            return [float(zlib.crc32(text.encode()) % 5) for text in completions]

        refused = 0
        for seed in range(3):
            recipe, sources = made(model, seed=seed)
            sources.rewards = InMemoryInputs(USERS, arbitrary, PUBLIC).rewards
            try:
                measure(recipe, sources, prompts=24)
            except DprlhfError as error:
                refused += "no signal could be measured on 24" in str(error)
        assert refused == 3
        with pytest.raises(DprlhfError, match=r"update\.name npg with an oracle"):
            measure(*made(model, update__name="npg"))

    @pytest.mark.slow
    def test_no_users_prompt_is_read(self, model: str) -> None:
        recipe, sources = made(model)
        seen: list[str] = []
        select = Users.select

        def watched(users: Users, *arguments: Any, **options: Any) -> Any:
            prompts = select(users, *arguments, **options)
            seen.extend(prompts.prompts)
            return prompts

        with mock.patch.object(Users, "select", watched):
            choose(measure(recipe, sources, prompts=120), responses=ONE_PASS)
        assert seen
        assert all(prompt.startswith("public") for prompt in seen)

    @pytest.mark.slow
    def test_no_prompt_that_settings_are_chosen_by_is_a_users(self, model: str) -> None:
        """A run itself takes fewer public rows than the planner, and compares those alone."""
        recipe, _ = made(model)
        rows = PUBLIC[:130]
        for place, prompts, expected in ((120, 120, True), (125, 120, False), (120, 110, False)):
            mixed = [*rows[:place], USERS[3], *rows[place:]]
            sources = InMemoryInputs(USERS, lower_case, mixed)
            with (
                pytest.raises(DprlhfError, match="are users' rows, too")
                if expected
                else contextlib.nullcontext()
            ):
                measure(recipe, sources, prompts=prompts)


@pytest.mark.slow
class TestChoose:
    def test_the_choices_are_plans_of_the_accountant(self, facts: Facts) -> None:
        best, _ = choose(facts, rounds=[4, 6], responses=ONE_PASS, show=3)
        assert len(best) == 3
        for choice in best:
            candidate = choice.candidate
            again = make_plan(
                users=len(USERS), rounds=candidate.rounds, delta=1e-5, epsilon=8.0,
                partition=candidate.partition, bands=candidate.bands,
                participations=candidate.participations,
            )  # fmt: skip
            assert choice.plan.guarantee.epsilon <= 8.0
            assert choice.plan.noise_multiplier == pytest.approx(again.noise_multiplier, rel=0.03)

    def test_it_keeps_to_the_budget(self, facts: Facts) -> None:
        best, _ = choose(facts, responses=ONE_PASS)
        assert all(choice.candidate.responses == RESPONSES for choice in best)
        assert all(choice.candidate.participations == 1 for choice in best)
        with pytest.raises(DprlhfError, match="no choice fits into 100 responses"):
            choose(facts, responses=100)
        with pytest.raises(DprlhfError, match="no choice fits into 1e-09 minutes"):
            choose(facts, minutes=1e-9)

    def test_distance_in_all_is_kept(self, facts: Facts) -> None:
        best, _ = choose(facts, rounds=[4, 12], responses=ONE_PASS)
        assert all(c.learning_rate * c.plan.rounds == pytest.approx(0.05 * 6) for c in best)
        recipe = with_choice(facts.recipe, best[0].candidate)
        assert recipe.optimizer.learning_rate == pytest.approx(best[0].learning_rate)


def test_the_time_of_a_round_counts_the_public_prompts_that_there_are(model: str) -> None:
    recipe, _ = made(model, update__subspace={"rank": 2, "prompts": 256})
    plan = make_plan(users=len(USERS), rounds=6, delta=1e-5, epsilon=8.0)
    phases = {"rollout": 2.0, "reward": 0.5, "update": 1.0}
    rows = Users(Dataset.from_dict({"prompt": PUBLIC}), recipe.data)
    alone, few, all_of_them = (
        seconds_a_round(recipe, plan, phases, guides)
        for guides in (None, Guides(rows, len(PUBLIC) - 96), Guides(rows))
    )
    assert alone == plan.expected_batch_size * RESPONSES * 3.5
    assert few - alone == 96 * RESPONSES * 3.5
    assert all_of_them - alone == len(PUBLIC) * RESPONSES * 3.5


@pytest.mark.slow
def test_a_dry_run_compares_the_noise_of_what_is_released(model: str) -> None:
    shown = dry_run(*made(model, update__subspace={"rank": 2, "prompts": 8}))
    plan = make_plan(users=len(USERS), rounds=6, delta=1e-5, epsilon=8.0)
    assert shown["dimension"] > 2
    assert shown["noise_to_clip_ratio"] == pytest.approx(plan.noise_to_clip_ratio(2))
