"""Canaries that share a model's parameters are read as if each had a coordinate of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from dprlhf.audit.canaries import prompt_run
from dprlhf.audit.guesses import log_likelihood_ratio, readings_refute
from dprlhf.audit.one_run import audit
from dprlhf.audit.watched_gate import PromptReadings
from dprlhf.gradients.per_user import PerUserGradients
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Recipe, make_recipe
from dprlhf.runs.folder import RunFolder
from helpers import tiny
from helpers.recipes import recipe_settings

CANARIES, DIMENSION = 60, 100
PLANS = {
    "fixed": {"partition": "fixed"},
    "random rounds": {},
    "replace-one": {"adjacency": "replace-one", "partition": "stream"},
}


def own_model(folder: Path, **changes: Any) -> Recipe:
    """A recipe of a small model whose responses depend on the prompt."""
    model = tiny.model()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5)
    model.save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    path = str(folder / "model")
    adapter = {"type": "lora", "rank": 8, "target_modules": "all-linear"}
    policy = {"policy__model_name_or_path": path, "policy__adapter": adapter}
    return make_recipe(recipe_settings(**policy, rollout__responses=8, **changes))


def similar(random: np.random.Generator, count: int) -> np.ndarray:
    """Vectors of norm 1 that have much of their length in common, ``[count, dimension]``."""
    vectors = random.standard_normal((count, DIMENSION)) + 2 * random.standard_normal(DIMENSION)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def one_run(plan: Any, random: np.random.Generator, share: float = 1.0) -> tuple[Any, ...]:
    """Readings of a run whose contributions are similar vectors; who is in; and their rounds.

    The noise is that share of the planned one.
    """
    included = random.random(CANARIES) < 0.5
    opposed = plan.adjacency == "replace-one"
    reader = PromptReadings(np.where(included, 1.0, -1.0 if opposed else np.nan), plan, random)
    known = random.permutation(np.arange(CANARIES) % plan.rounds)
    for t in range(1, plan.rounds + 1):
        members = np.flatnonzero(known == t - 1)
        vectors = similar(random, len(members))
        others = -vectors if opposed else np.zeros_like(vectors)
        total = np.where(included[members, None], vectors, others).sum(0)
        reader.expect(members, vectors, others)
        noise = share * plan.noise_multiplier * random.standard_normal(DIMENSION)
        reader.read(t, total, total + noise)
    assert reader.faults == []
    return reader, included, known


def refuted(plan: Any, share: float, level: float, runs: int) -> float:
    """In which share of runs with that share of the noise the plan's noise is refuted."""
    random, count = np.random.default_rng(3), 0
    for _ in range(runs):
        reader, included, known = one_run(plan, random, share)
        rounds = known if plan.mechanism.spec.disjoint else None
        sizes = reader.sizes[:, None]
        noise = reader.noise.mean() / sizes
        scores = log_likelihood_ratio(reader.readings / sizes, plan, rounds, noise)
        right = (scores > 0) == included
        count += readings_refute(right, reader.sizes, plan, plan.noise_multiplier, level)
    return count / runs


@pytest.mark.slow
@pytest.mark.parametrize("given", PLANS.values(), ids=PLANS)
def test_the_planned_noise_is_refuted_no_more_often_than_stated(given: dict[str, Any]) -> None:
    """Although the canaries are similar; the control has a quarter of the noise."""
    plan = make_plan(users=CANARIES, rounds=2, delta=1e-5, noise_multiplier=1.0, **given)
    level, runs = 0.2, 300
    assert refuted(plan, 1.0, level, runs) <= level + 3 * (level * (1 - level) / runs) ** 0.5
    assert refuted(plan, 0.25, level, 50) > 0.5


def test_readings_have_the_planned_noise_and_nothing_of_other_canaries() -> None:
    plan = make_plan(users=CANARIES, rounds=2, delta=1e-5, noise_multiplier=0.8, partition="fixed")
    random, noise = np.random.default_rng(4), []
    for _ in range(40):
        reader, included, known = one_run(plan, random)
        seen = reader.readings[np.arange(CANARIES), known]
        noise += [*seen[~included]]
    assert kstest(np.array(noise) / 0.8, "norm").pvalue > 0.001
    control = np.array(noise) + 0.3  # a canary that is out would be seen by a third
    assert kstest(control / 0.8, "norm").pvalue < 0.001


def test_more_canaries_than_dimensions_are_guessed_by_chance() -> None:
    users = 2 * DIMENSION
    plan = make_plan(users=users, rounds=1, delta=1e-5, noise_multiplier=0.01, partition="fixed")
    random, included = np.random.default_rng(5), np.arange(users) % 2 == 0
    reader = PromptReadings(np.where(included, 1.0, np.nan), plan, random)
    vectors = similar(random, users)
    reader.expect(np.arange(users), vectors, np.zeros_like(vectors))
    total = vectors[included].sum(0)
    reader.read(1, total, total)
    right = (reader.readings[:, 0] > reader.sizes / 2) == included
    assert right[:DIMENSION].mean() > 0.95
    assert 0.3 < right[DIMENSION:].mean() < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("update", ["pg", "grpo", "ppo"])
def test_canaries_of_the_recipes_own_model_are_recognised(update: str, tmp_path: Path) -> None:
    """Without noise, nearly all of them."""
    changes = {"rounds": 2, "update": {"name": update}, "privacy": {"noise_multiplier": 0}}
    recipe = own_model(tmp_path, **changes)
    signs = np.where(np.random.default_rng(2).random(60) < 0.5, 1.0, np.nan)
    record = prompt_run(recipe, RunFolder(tmp_path / "run"), signs, True, lambda *told: None)
    assert record.prompts is not None
    assert record.prompts.faults == []
    sure = record.prompts.readings.max(1) > 0.5
    assert (sure == (signs == 1)).mean() >= 0.9  # some are answered by letters of one kind alone


@pytest.mark.slow
def test_a_sum_that_is_not_the_canaries_contributions_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PerUserGradients.add_weighted_sum

    def wrong(engine: PerUserGradients, factors: torch.Tensor, total: torch.Tensor) -> None:
        right(engine, factors * 2, total)

    recipe = own_model(tmp_path, rounds=1)
    monkeypatch.setattr(PerUserGradients, "add_weighted_sum", wrong)
    found = audit(recipe, tmp_path / "audit", canaries=12, space="prompt", seed=1, quiet=True)
    assert any("other than its users' contributions" in reason for reason in found.refuted_by)
