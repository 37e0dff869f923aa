"""The rivals' table: who is trained on, what is tried for whom, and what counts as first."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from dprlhf.data.public import HELD_OUT
from dprlhf.data.users import Prompts
from dprlhf.recipe import load_recipe
from dprlhf.worth.runs import overrides_of
from dprlhf.worth.tasks import TASKS, TUNING_USERS, PublicPrompts
from helpers import tiny
from helpers.runs import save_sharp
from worth import rival_methods, rivals
from worth.rival_methods import Place

SMALL = Path("folder")


def test_as_many_settings_are_tried_for_each_method() -> None:
    counts = {len({str(setting) for setting in one.tried}) for one in rivals.RIVALS.values()}
    assert counts == {4}


@pytest.mark.parametrize("task", ["community", "praise", "taste"])
def test_settings_are_chosen_on_users_and_prompts_of_no_table(task: str) -> None:
    pool = TASKS[task].users - TUNING_USERS
    for tuning in (False, True):
        for seed in (0, 1, 4, rivals.TUNING_SEED):
            place = Place(task, rivals.USERS, 2.0, seed, SMALL, tuning)
            made = rival_methods.recipe_for(place, {})
            first = made.data.skip
            assert made.data.limit == rivals.USERS
            assert (first >= pool) if tuning else (first + rivals.USERS <= pool)
            assert first + rivals.USERS <= TASKS[task].users
            assert made.evaluation is not None
            taken = rival_methods.EVALUATED + HELD_OUT
            assert (made.evaluation.data.skip >= taken) == tuning
    assert rival_methods.public_of(task, "reviews").skip >= rival_methods.EVALUATED


def test_the_budget_is_the_asked_one_and_plain_runs_have_none() -> None:
    private = rival_methods.recipe_for(Place("community", 600, 0.5, 0, SMALL), {})
    assert (private.privacy.epsilon, private.data.max_prompts_per_user) == (0.5, 1)
    assert math.isfinite(private.update.radius)
    plain = rival_methods.recipe_for(Place("community", 600, math.inf, 0, SMALL), {})
    assert math.isinf(plain.privacy.epsilon or 0)
    assert math.isinf(plain.update.radius)


REWARD = """
def score(prompts, completions, **columns):
    return [4.0 * sum(c.islower() for c in text) / max(len(text), 1) for text in completions]
"""
RECIPE = """
policy:
  model_name_or_path: {folder}/model
  adapter: {{type: ffa-lora, rank: 1, target_modules: [c_attn]}}
data: &data
  path: {folder}/private.jsonl
  prompt_column: text
  prompt_words: 3
  max_prompt_tokens: 16
rewards: [{{function: "{folder}/reward.py:score", times_column: wants}}]
rollout: {{base_policy: on-policy, max_new_tokens: 8, responses: 4, batch_size: 64}}
update: {{name: pg, baseline: loo, clip_norm: 1, batch_size: 64}}
privacy: {{delta: 1.0e-5, partition: random-allocation}}
rounds: 2
evaluation:
  data: {{<<: *data, path: {folder}/public.jsonl}}
  prompts: 4
  declared_public: true
"""


@pytest.fixture
def miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Forty users of a tiny model, whose reward is the share of small letters times a wish."""
    save_sharp(tmp_path / "model")
    tiny.save(tmp_path / "scorer")
    (tmp_path / "reward.py").write_text(REWARD)
    for name, count in (("private", 40), ("public", 460)):
        rows = [{"text": f"{name} {i} says this and that", "wants": -1} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(RECIPE.format(folder=tmp_path))

    def made(place: Place, changes: Any) -> Any:
        settings = {"privacy.epsilon": place.epsilon if math.isfinite(place.epsilon) else ".inf"}
        if math.isinf(place.epsilon):
            settings["update.clip_norm"] = ".inf"
        given = overrides_of({**settings, **changes})
        return load_recipe(tmp_path / "task.yaml", overrides=given)

    public = PublicPrompts(str(tmp_path / "public.jsonl"), "train")
    monkeypatch.setattr(rival_methods, "recipe_for", made)
    monkeypatch.setattr(rival_methods, "public_of", lambda *_: public)
    monkeypatch.setattr(rival_methods, "public_scorer", lambda *_: tmp_path / "scorer")
    rival_methods.liked.cache_clear()
    return Place("community", 40, 2.0, 0, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain updates", "dp-sft", "dp-dpo", "dp-reward", "public"])
def test_each_method_trains_and_spends_at_most_what_it_was_given(
    miniature: Place, tmp_path: Path, name: str
) -> None:
    rival = rivals.RIVALS[name]
    place = replace(miniature, epsilon=rivals.epsilons_of(name, [2.0])[0])
    found = rival_methods.measure(rival.method, place, rival.tried[-1], tmp_path / "run")
    assert found["epsilon"] == 0.0 if name == "public" else 1.9 < found["epsilon"] <= 2.0
    assert math.isfinite(found["gain"])


@pytest.mark.slow
@pytest.mark.parametrize(("split", "users", "known"), [
    ("users", 20, "disjoint"), ("budget", 40, "shared"),
])  # fmt: skip
def test_pairs_and_private_prompts_share_the_users_or_the_budget(
    miniature: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    split: str, users: int, known: str,
) -> None:  # fmt: skip
    update = {"name": "pg", "baseline": "loo", "clip_norm": 1.0, "batch_size": 64}
    monkeypatch.setattr(rival_methods, "_update", lambda *_: update)
    [setting, *_] = [s for s in rivals.RIVALS[rivals.PAIRS_PRIVATE].tried if s["split"] == split]
    found = rival_methods.measure(rival_methods.by_reward, miniature, setting, tmp_path / "run")
    assert 1.9 < found["epsilon"] <= 2.0
    tuned = load_recipe(tmp_path / "run/recipe.yaml")
    assert (tuned.data.skip, tuned.data.limit or 40) == (40 - users, users)
    assert [one.users for one in tuned.previous] == [known]
    private = json.loads((tmp_path / "run-reward/privacy.json").read_text())
    assert private["users"] == users


def test_on_taste_a_user_compares_two_samples_and_then_the_other_two(
    miniature: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, by_reward = rival_methods.liked(miniature)
    monkeypatch.setattr(rival_methods, "prefers", lambda one, two, _: one >= two)
    rival_methods.liked.cache_clear()
    prompts, ordered = rival_methods.liked(replace(miniature, task=rival_methods.TASTE))
    rows = rival_methods.pairs_of(prompts, ordered, 2)
    for user, texts in enumerate(by_reward):
        place = {text: i for i, text in enumerate(texts)}
        own = rows[rows["user"] == str(user)]
        assert sorted(own[["chosen", "rejected"]].to_numpy().ravel()) == sorted(texts)
        assert all(place[r.chosen] <= place[r.rejected] for r in own.itertuples())


def test_a_users_samples_are_ordered_by_its_own_wish(miniature: Place) -> None:
    prompts, ordered = rival_methods.preferences(miniature)
    for texts in ordered:
        small = [sum(c.islower() for c in text) / max(len(text), 1) for text in texts]
        assert small == sorted(small)  # every user wants fewer small letters
    rows = rival_methods.own_texts(rival_methods.recipe_for(miniature, {}), prompts)
    assert rows.loc[7].tolist() == ["private 7 says", " this and that"]


def test_pairs_are_of_one_user_and_the_better_sample_is_chosen() -> None:
    prompts = Prompts(["p", "q"], np.arange(2), np.zeros(2, dtype=np.int64), {})
    found = rival_methods.pairs_of(prompts, [["a", "b", "c", "d"], ["e", "f", "g", "h"]], 2)
    assert found.to_numpy().tolist() == [
        ["0", "p", "a", "d"],
        ["0", "p", "b", "c"],
        ["1", "q", "e", "h"],
        ["1", "q", "f", "g"],
    ]


NAMES = [rivals.OURS, "dp-dpo", "public", "rloo"]
CELLS = rivals.cells_of("community", dict.fromkeys(NAMES, 0))


def found_in(seeds: int, ours: float, theirs: float) -> dict[tuple[rivals.Cell, int], float]:
    """Return gains in all cells; seed s adds s to each."""
    return {
        (cell, seed): (ours if cell.rival == rivals.OURS else theirs) + seed
        for cell in CELLS
        for seed in range(seeds)
    }


def test_a_method_without_an_epsilon_is_measured_once() -> None:
    assert len(CELLS) == 2 * len(rivals.EPSILONS) + 2
    assert sorted(rivals.ORDER) == rivals.EPSILONS


def test_settings_are_chosen_when_all_methods_had_their_tries() -> None:
    tried = rivals.tried_of("community", ["dp-sft", "public"], 2)
    assert [(cell.rival, cell.setting) for cell in tried[:3]] == [
        ("dp-sft", 0), ("public", 0), ("dp-sft", 1),
    ]  # fmt: skip
    gains = dict(zip(tried, [0.3, 0.1, 0.2, 0.4], strict=True))
    assert rivals.chosen_of(gains, ["dp-sft", "public"], 2) == {"dp-sft": 0, "public": 1}
    del gains[tried[-1]]
    assert rivals.chosen_of(gains, ["dp-sft", "public"], 2) == {}


def test_only_seeds_that_are_finished_everywhere_count() -> None:
    found = found_in(3, 1.0, 0.0)
    needed = next(cell for cell in reversed(CELLS) if cell.rival == "dp-dpo")
    del found[needed, 1]
    table = rivals.table_of(CELLS, found)
    assert table is not None
    assert table.seeds == 2
    assert table.at("public", 8.0).tolist() == [0.0, 2.0]
    assert table.at("dp-dpo", 0.5).tolist() == [0.0, 2.0]


def test_before_the_first_seed_the_finished_epsilons_are_shown() -> None:
    found = {(cell, 0): gain for (cell, s), gain in found_in(1, 1.0, 0.0).items() if s == 0}
    for cell in CELLS:
        if cell.epsilon == 0.5 and cell.rival == "dp-dpo":
            del found[cell, 0]
    table = rivals.table_of(CELLS, found)
    assert table is not None
    assert (table.seeds, table.epsilons) == (1, [1.0, 2.0, 4.0, 8.0])
    [row] = [one for one in rivals.rows(table) if "first" in one.name]
    assert (row.value, row.unit, row.holds) == (4, "of 4", False)
    assert rivals.table_of(CELLS, {}) is None


@pytest.mark.parametrize(("ours", "seeds", "first", "holds"), [
    (1.0, 5, 5, True), (1.0, 4, 5, False), (-1.0, 5, 0, False),
])  # fmt: skip
def test_first_is_stated_with_enough_seeds(
    ours: float, seeds: int, first: int, holds: bool
) -> None:
    table = rivals.table_of(CELLS, found_in(seeds, ours, 0.0))
    assert table is not None
    [row] = [one for one in rivals.rows(table) if "first" in one.name]
    assert (row.value, row.holds) == (first, holds)
    assert f"{ours + (seeds - 1) / 2:+.2f} ±" in "\n".join(rivals.lines(table))


def test_a_method_without_privacy_is_no_rival() -> None:
    found = found_in(2, 1.0, 0.0)
    for cell, seed in found:
        if cell.rival == "rloo":
            found[cell, seed] = 9.0
    table = rivals.table_of(CELLS, found)
    assert table is not None
    assert float(np.mean(table.lead(1.0))) == 1.0
