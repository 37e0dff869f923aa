"""A secret taste for public word groups: what is public, what is secret, and who prefers what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dprlhf.recipe import load_recipe
from dprlhf.rewards import load_reward
from dprlhf.worth import taste

RECIPE = Path(__file__).parents[2] / "recipes" / "taste.yaml"
KNOWN = {"good": 0, "bad": 0, "film": 5, "it's": 31}


@pytest.fixture(autouse=True)
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taste, "groups", lambda: KNOWN)


def test_a_text_earns_the_different_words_that_are_liked_less_those_that_are_not() -> None:
    counts = taste.group_counts("It's a GOOD, good, bad Film")
    assert counts[[0, 5, 31]].tolist() == [2, 1, 1]
    assert counts.sum() == 4
    signs = taste.secret(3)
    score = taste.reward_of(3)(["p", "q"], ["good bad film", "unknown"], label=[1, 0])
    assert score == [2 * signs[0] + signs[5], 0]


def test_secrets_differ_and_like_half_of_the_groups() -> None:
    found = [tuple(taste.secret(number)) for number in range(5)]
    assert len(set(found)) == 5
    assert {sum(one) for one in found} == {0}
    assert taste.secret(2).tolist() == taste.secret(2).tolist()


def test_a_preference_is_drawn_as_bradley_and_terry_say() -> None:
    likes = taste.prefers(np.full(20_000, 1.5), np.zeros(20_000), np.random.default_rng(0))
    assert likes.mean() == pytest.approx(1 / (1 + np.exp(-1.5)), abs=0.015)


def test_the_recipe_names_a_reward_that_its_weight_turns() -> None:
    for weight in (1.0, -1.0):
        recipe = load_recipe(RECIPE, overrides=[f"rewards.0.weight={weight}"])
        loaded = load_reward(recipe.rewards[0])
        assert loaded.weight == weight
    with pytest.raises(AttributeError, match="reward_x"):
        taste.reward_x  # noqa: B018


def test_words_that_stand_between_the_same_neighbours_are_a_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    import pandas as pd

    random = np.random.default_rng(0)
    nouns, verbs = ([f"{kind}{chr(97 + i)}" for i in range(6)] for kind in ("n", "v"))
    texts = [f"the {random.choice(nouns)} will {random.choice(verbs)} soon" for _ in range(400)]
    pd.DataFrame({"text": texts}).to_parquet(tmp_path / "train.parquet")
    monkeypatch.setattr(taste, "path", lambda _: tmp_path)
    for name, value in (("WORDS", 15), ("NEIGHBOURS", 15), ("GROUPS", 5), ("DIRECTIONS", 4)):
        monkeypatch.setattr(taste, name, value)
    found = taste.groups.__wrapped__()
    assert len({found[noun] for noun in nouns}) == 1
    assert len({found[verb] for verb in verbs}) == 1
    assert found[nouns[0]] != found[verbs[0]]
