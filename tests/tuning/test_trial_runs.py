"""Trial runs of planned choices: each has its own settings and noise, and the rise decides."""

from __future__ import annotations

import json
import math
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dprlhf.cli.output import choices_table
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Recipe, make_recipe
from dprlhf.training.choices import Candidate, Choice, Signal
from dprlhf.tuning import trial_runs
from dprlhf.tuning.public_rows import public_rows
from dprlhf.tuning.trial_runs import TriedChoice, try_choices
from helpers import tiny
from helpers.runs import ADAPTER, lower_case

USERS = 60
PUBLIC = [f"public {i}" for i in range(120)]


def choice(rounds: int, partition: Any = "random-allocation", responses: int = 2) -> Choice:
    plan = make_plan(users=USERS, rounds=rounds, delta=1e-5, epsilon=8.0, partition=partition)
    candidate = Candidate(partition, rounds, 1, 1, responses)
    return Choice(candidate, plan, Signal(0.1, 1.0, 10), np.full(rounds, 0.5), 0.6 / rounds)


def recipe_of(model: str, **changes: Any) -> Recipe:
    return make_recipe(
        {
            "policy": {"model_name_or_path": model, "adapter": ADAPTER},
            "data": {"path": "no-such-file.csv", "limit": USERS},
            "rewards": [{"function": "in-memory"}],
            "privacy": {"epsilon": 8},
            "optimizer": {"learning_rate": 0.2},
            "rounds": 3,
            "rollout": {"max_new_tokens": 4},
            "evaluation": {"data": {"path": "in-memory"}, "prompts": 8},
            **changes,
        }
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the runs: a run rises by a tenth of its rounds, and by a hundredth of its seed."""
    calls: list[dict[str, Any]] = []

    def run(recipe: Recipe, public: Any, **named: Any) -> Any:
        calls.append({"recipe": recipe, "public": public, **named})
        rise = recipe.rounds / 10 + named["seed"] / 100
        return SimpleNamespace(rise=SimpleNamespace(mean=rise, standard_error=0.03))

    monkeypatch.setattr(trial_runs, "run_stand_ins", run)
    return calls


def test_every_run_has_the_settings_of_its_choice_and_the_largest_rise_is_first(
    asked: list[dict[str, Any]],
) -> None:
    choices = [choice(3), choice(6, "fixed"), choice(4, responses=4)]
    rows: Any = object()
    told: list[str] = []
    tried = try_choices(
        recipe_of("m"), choices, rows, runs=2, users=USERS, reward=lower_case, told=told.append
    )
    assert [t.choice.plan.rounds for t in tried] == [6, 4, 3]
    ran = [
        (c["recipe"].rounds, c["recipe"].privacy.partition, c["recipe"].rollout.responses,
         c["recipe"].optimizer.learning_rate, c["seed"])
        for c in asked
    ]  # fmt: skip
    assert ran == [
        (3, "random-allocation", 2, pytest.approx(0.2), 0),
        (3, "random-allocation", 2, pytest.approx(0.2), 1),
        (6, "fixed", 2, pytest.approx(0.1), 0),
        (6, "fixed", 2, pytest.approx(0.1), 1),
        (4, "random-allocation", 4, pytest.approx(0.15), 0),
        (4, "random-allocation", 4, pytest.approx(0.15), 1),
    ]
    assert all(c["public"] is rows and c["users"] == USERS for c in asked)
    assert all(c["reward"] is lower_case for c in asked)
    assert told[0] == "choice 1, run 1: rise 0.300"
    assert len(told) == 6


def test_the_standard_error_has_the_prompts_and_the_runs() -> None:
    rises = [1.0, 1.3, 1.6, 1.1]
    tried = TriedChoice(choice(3), rises, 0.05)
    over_runs = math.sqrt(sum((r - 1.25) ** 2 for r in rises) / 3 / 4)
    assert tried.rise == pytest.approx(1.25)
    assert tried.standard_error == pytest.approx(math.sqrt(over_runs**2 + 0.05**2))
    assert TriedChoice(choice(3), [1.0], 0.05).standard_error == pytest.approx(0.05)


def test_the_table_shows_what_was_measured() -> None:
    tried = TriedChoice(choice(3), [1.0, 1.5], 0.0)
    row = json.loads(json.dumps(tried.as_dict()))
    header, line = choices_table([row]).splitlines()
    assert header.endswith("trial runs")
    assert line.endswith("+1.250 ± 0.250")
    assert len(header) == len(line)
    assert "trial runs" not in choices_table([choice(3).as_dict()])


@pytest.mark.slow
def test_a_trial_run_is_a_run_on_public_prompts(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny.save(tmp_path_factory.mktemp("model")))
    # Long steps, and a reward that any other character changes: two runs' rises must differ.
    recipe = recipe_of(model, optimizer={"learning_rate": 5.0}, rollout={"max_new_tokens": 16})
    seen: set[str] = set()

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen.update(prompts)
        return [zlib.crc32(text.encode()) / 2**32 for text in completions]

    rows = public_rows(recipe, rows=PUBLIC, scored=16)
    (tried,) = try_choices(recipe, [choice(3)], rows, runs=2, users=USERS, reward=reward)
    assert len(tried.rises) == 2
    assert tried.rises[0] != tried.rises[1]
    assert tried.standard_error > 0
    assert seen <= set(PUBLIC[8:])
