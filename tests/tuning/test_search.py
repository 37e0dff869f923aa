"""The search: it finds what is better, is continued where it stopped, and says what it rests on."""

import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dprlhf import DprlhfError
from dprlhf.recipe import Recipe, load_recipe
from dprlhf.training.evaluate import RewardEstimate
from dprlhf.tuning import search
from dprlhf.tuning.public_rows import PublicRows, public_rows
from dprlhf.tuning.search import Search
from dprlhf.tuning.stand_in import StandInRun, StoppedEarlyError
from helpers import tiny
from helpers.commands import dprlhf

RECIPE = """\
# The recipe of these tests.
policy: {model_name_or_path: model}
data: {path: no-such-file.csv, limit: 400}
rewards: [{function: in-memory}]
update:
  name: pg
  baseline: loo   # of the user's own responses
optimizer:
  learning_rate: 0.01   # a guess
privacy: {epsilon: 4}
rounds: 12
evaluation: {data: {path: in-memory}, prompts: 8}
"""
KEYS = ["update.name", "optimizer.learning_rate"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def rows_for(recipe: Recipe) -> PublicRows:
    return public_rows(recipe, rows=[f"public {i}" for i in range(300)], scored=64)


class Simulated:
    """Stand-in runs without a model: the reward is best at one learning rate, and is noisy."""

    def __init__(self, best: float = 0.05, noise: float = 0.02, seconds: float = 60.0) -> None:
        self.runs: list[Recipe] = []
        self._best, self._noise, self._seconds = best, noise, seconds
        self.clock = 0.0
        self.fail_at = math.inf
        self.error: BaseException = KeyboardInterrupt()

    def true(self, recipe: Recipe) -> float:
        off = math.log(recipe.optimizer.learning_rate / self._best)
        return 2 - off**2 / 4 + (0.1 if recipe.update.name == "grpo" else 0.0)

    def __call__(self, recipe: Recipe, public: Any, **given: Any) -> StandInRun:
        self.runs.append(recipe)
        reward = self.true(recipe) + self._noise * np.random.default_rng(len(self.runs)).normal()
        for t in range(3, recipe.rounds, 3):
            if given["stop"](t, reward * t / recipe.rounds):
                self.clock += self._seconds * t / recipe.rounds
                raise StoppedEarlyError("stopped")
        if len(self.runs) == self.fail_at:
            raise self.error
        self.clock += self._seconds
        estimate = RewardEstimate(reward, 0.05, 64)
        return StandInRun(
            plan=mock.Mock(users=400, noise_multiplier=1.0, expected_batch_size=33.0),
            stand_ins=given["stand_ins"], prompts=164, dimension=10, before=estimate,
            after=estimate, rise=estimate, curve=[(0, 0.0), (12, reward)],
            kl=100 * recipe.optimizer.learning_rate, penalty=0.0, seconds=self._seconds,
        )  # fmt: skip


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    simulation = Simulated()
    monkeypatch.setattr(search, "run_stand_ins", simulation)
    monkeypatch.setattr(time, "monotonic", lambda: simulation.clock)
    return simulation


def search_for(file: Path, **changes: Any) -> Search:
    recipe = load_recipe(file)
    given = {"minutes": 45.0, "users": 400, "stand_ins": 400} | changes
    return Search(recipe, rows_for(recipe), KEYS, file.with_suffix(".trials"), **given)


@pytest.mark.slow
def test_it_finds_a_better_learning_rate_and_update(file: Path, simulated: Simulated) -> None:
    running = search_for(file)
    running.run()
    tuned = running.result()
    own = load_recipe(file)
    assert simulated.runs[0] == own
    assert simulated.true(tuned.recipe) > simulated.true(own) + 0.5
    assert simulated.true(tuned.recipe) > 1.95
    assert tuned.best.score == max(t.score for t in tuned.decided)
    assert tuned.own.changes == {}
    assert {t.runs for t in tuned.decided} <= {3, 4}
    assert len(tuned.decided) == 4  # three of the best, and the recipe as it is
    assert tuned.stopped > 0  # those far off were not run to their end
    assert simulated.clock <= 45 * 60


@pytest.mark.slow
def test_only_runs_after_the_search_decide(file: Path, simulated: Simulated) -> None:
    """Where all settings are alike the best trial is luck; what it had then is not counted."""
    simulated._noise = 0.5
    with mock.patch.object(Simulated, "true", return_value=0.0):
        running = search_for(file)
        running.run()
        tuned = running.result()
    lucky = tuned.searched[0].score
    assert lucky > 0.5
    again = next(t for t in tuned.decided if t.changes == tuned.searched[0].changes)
    assert again.score < lucky
    assert again.runs >= 3


@pytest.mark.parametrize("minutes", [0.0, math.inf, math.nan])
def test_a_time_that_never_ends_is_refused(file: Path, minutes: float) -> None:
    with pytest.raises(DprlhfError, match="minutes must be a positive number"):
        search_for(file, minutes=minutes)


@pytest.mark.parametrize("limit", [{"trials": 2}, {"minutes": 3.5}])
def test_runs_that_decide_wait_for_no_trial_of_the_search(file, simulated, limit):
    """What the search had no time or no number for is not run in the time of the last runs."""
    lines: list[str] = []
    running = search_for(file, **limit)
    running.run(lines.append)
    tuned = running.result()
    trials = sum(line.startswith("trial") for line in lines)
    assert trials == len(tuned.searched) == 2
    again = sum(line.startswith("run again") for line in lines)
    assert len(running._ended(confirming=True)) == again > 0


@pytest.mark.parametrize("at", [1, 5])
def test_an_interrupted_search_goes_on(file: Path, simulated: Simulated, at: int) -> None:
    simulated.fail_at = at
    running = search_for(file)
    with pytest.raises(KeyboardInterrupt):
        running.run()
    if at == 1:
        with pytest.raises(DprlhfError, match="has not been tried to the end"):
            running.result()
    else:
        assert running.result().own.runs == 1
    before, simulated.clock = len(simulated.runs), 0.0
    running = search_for(file, trials=8, seed=-20)
    running.run()
    searched = [r for r in running._study.trials if "confirms" not in r.user_attrs]
    assert len(searched) == 8
    assert len(simulated.runs) > before
    assert running.result().own.changes == {}


def test_the_trials_of_another_search_are_refused(file: Path, simulated: Simulated) -> None:
    search_for(file)
    with pytest.raises(DprlhfError, match=r"another search \(users\)"):
        search_for(file, users=500)
    with pytest.raises(DprlhfError, match="its trials have 400 stand-ins"):
        search_for(file, stand_ins=100)
    file.write_text(RECIPE.replace("epsilon: 4", "epsilon: 2"))
    with pytest.raises(DprlhfError, match=r"another search \(recipe\)"):
        search_for(file)


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny.save(tmp_path / "model")
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def lower(completions, **columns):\n"
        "    return [4.0 * sum(c.islower() for c in t) / max(len(t), 1) for t in completions]\n"
    )
    (tmp_path / "public.csv").write_text("prompt\n" + "\n".join(f"public {i}" for i in range(200)))
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.replace("{model_name_or_path: model}", f"{{model_name_or_path: {model}}}")
        .replace("function: in-memory", f"function: {rewards}:lower")
        .replace("path: in-memory", "path: public.csv")
        .replace("rounds: 12", "rounds: 3\nrollout: {max_new_tokens: 4}")
        .replace("limit: 400", "limit: 30")
    )
    call = ["tune", "recipe.yaml", "--trials", "1", "--minutes", "5", "--scored", "16"]
    call += ["--search", "update.clip_norm", "--output", "new.yaml"]
    ended = dprlhf(*call, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "the recipe as it is:" in ended.stdout
    assert "no privacy cost" in (tmp_path / "new.yaml").read_text()
    assert (tmp_path / "new.trials").is_file()
    assert not [*tmp_path.glob("runs*")]
    assert load_recipe("new.yaml").privacy.epsilon == 4
