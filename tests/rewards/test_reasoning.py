from __future__ import annotations

import sys

import pytest

from dprlhf.errors import DprlhfError
from dprlhf.recipe import Reward
from dprlhf.rewards import check_reward, load_reward, reasoning


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DprlhfError, match=r"pip install \"dprlhf\[reasoning"):
        reasoning.questions("chain_sum", 2, seed=0)
    with pytest.raises(DprlhfError, match=r"pip install \"dprlhf\[reasoning"):
        reasoning.score(["1"], entry=["{}"])


@pytest.mark.slow
def test_its_own_scores_are_the_reward() -> None:
    pytest.importorskip("reasoning_gym")
    rows = reasoning.questions("chain_sum", 6, seed=1)
    assert rows.equals(reasoning.questions("chain_sum", 6, seed=1))
    # reasoning-gym's own seeds 1 and 2 would share five of six.
    others = reasoning.questions("chain_sum", 6, seed=2)
    assert len(set(rows["prompt"]) & set(others["prompt"])) <= 1
    answers, entry = rows["answer"].tolist(), rows["entry"].tolist()
    assert reasoning.score(answers, entry=entry) == [1.0] * 6
    assert reasoning.score([f"so\n#### {a}" for a in answers], entry=entry) == [1.0] * 6
    assert max(reasoning.score(["no idea"] * 6, entry=entry)) < 0.1
    reward = load_reward(Reward(function="dprlhf.rewards.reasoning:score"))
    check_reward(reward, rows["prompt"].tolist(), answers, {"entry": entry})
