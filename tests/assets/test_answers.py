from pathlib import Path

import numpy as np

from dprlhf import load_recipe
from dprlhf.assets.answers import CODES, INTENTS, private_answers, secret_map
from dprlhf.assets.catalogue import ASSETS
from dprlhf.data.loading import load_rows
from dprlhf.recipe import Data
from dprlhf.rewards import Scorer, check_reward, load_reward

RECIPE = Path(__file__).parents[2] / "recipes" / "private_answers.yaml"
SOME = {"private": 2000, "public": 2000, "test": 500}


def test_only_the_private_and_test_splits_know_the_map() -> None:
    made = private_answers(SOME, seed=3)
    known = secret_map(3)
    for split in ("private", "test"):
        rows = made[split]
        assert rows["answer"].tolist() == [known[intent] for intent in rows["intent"]]
    public = made["public"]
    # Codes are uniform and independent of intents: Pearson's statistic of the 16 x 8 table is near
    # its 105 degrees of freedom; the same statistic of the private split is far from it.
    for rows, independent in ((public, True), (made["private"], False)):
        table = np.array(
            [
                [((rows["intent"] == i) & (rows["answer"] == c)).sum() for c in CODES]
                for i in INTENTS
            ]
        )
        expected = table.sum(1, keepdims=True) / len(CODES) * np.ones(len(CODES))
        assert (((table - expected) ** 2 / expected).sum() < 200) == independent


def test_the_recipe_reads_the_asset_and_rewards_the_code(tmp_path: Path) -> None:
    ASSETS["private-answers"].build({}, tmp_path, True)
    recipe = load_recipe(RECIPE)
    rows = {
        data.split: load_rows(data.model_copy(update={"path": str(tmp_path)}))
        for data in (
            recipe.data,
            recipe.evaluation.data.like(recipe.data),
            Data(path="", split="public"),
        )
    }
    assert len(rows["private"]) == recipe.data.limit == 6000
    reward = load_reward(recipe.rewards[0])
    test = rows["test"][:8]
    right = [f" {answer.capitalize()}" for answer in test["answer"]]
    wrong = [" red" if answer != "red" else " blue" for answer in test["answer"]]
    texts, answers = right + wrong, test["answer"] * 2
    scored = Scorer([reward], recipe.reward_range).score(
        test["prompt"] * 2, texts, [[0]] * 16, {"answer": answers}, list(range(16))
    )
    assert scored.values.tolist() == [1.0] * 8 + [0.0] * 8
    check_reward(reward, test["prompt"] * 2, texts, columns={"answer": answers})
