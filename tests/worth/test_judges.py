"""Judges score the texts of finished runs, with the users' wishes and the run's sign."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from dprlhf.worth.judges import agreement, rise_by

WISHES = [1, -1, -1, 1]
BEFORE = ["aa", "bb", "cc", "dd"]
AFTER = ["aaaa", "b", "cccccc", "d"]
JUDGE = """
def judge(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
"""


def finished(folder: Path, weight: float) -> Path:
    """Write what a finished run leaves, as far as a judge reads it."""
    folder.mkdir()
    rows = [{"text": f"prompt {i}", "wants": wish} for i, wish in enumerate(WISHES)]
    (folder / "public.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(folder / "public.jsonl"), "prompt_column": "text"}
    recipe = {
        "policy": {"model_name_or_path": "model", "adapter": {"target_modules": ["q"]}},
        "data": {"path": "users.csv"},
        "rewards": [{"function": "own:reward", "times_column": "wants", "weight": weight}],
        "privacy": {"epsilon": 4.0},
        "rounds": 2,
        "evaluation": {"data": data, "prompts": 4},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    samples = [
        {"prompt": row["text"], "before": old, "after": new}
        for row, old, new in zip(rows, BEFORE, AFTER, strict=True)
    ]
    (folder / "samples.json").write_text(json.dumps(samples))
    return folder


def test_a_judge_counts_for_and_against_as_the_users_wish(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    judge = {"function": f"{tmp_path / 'judge.py'}:judge"}
    longer = [len(new) - len(old) for old, new in zip(BEFORE, AFTER, strict=True)]
    expected = 0.5 * float(np.mean(np.multiply(longer, WISHES)))
    assert expected != 0
    run = finished(tmp_path / "run", 0.5)
    assert rise_by(judge, run, turned=False) == pytest.approx(expected)
    assert rise_by(judge, run, turned=True) == 0.0
    opposite = finished(tmp_path / "opposite", -0.5)
    assert rise_by(judge, opposite, turned=False) == pytest.approx(-expected)


def test_agreement_in_sign_and_rank() -> None:
    proxy = {name: np.array([v, v]) for name, v in (("a", -1.0), ("b", 0.5), ("c", 2.0))}
    gold = {name: np.array([v, v]) for name, v in (("a", -9.0), ("b", 0.1), ("c", 0.2))}
    assert agreement(proxy, gold) == (1.0, pytest.approx(1.0))
    other = {**gold, "c": np.array([-0.2, -0.3])}
    signs, ranks = agreement(proxy, other)
    assert signs == pytest.approx(2 / 3)
    assert ranks < 1
    same = {name: np.zeros(2) for name in proxy}
    assert math.isnan(agreement(proxy, same)[1])
