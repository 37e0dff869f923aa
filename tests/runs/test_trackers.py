"""Trackers get what metrics.jsonl gets, no clock of a round, and never lose a run."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker

from dprlhf.recipe import Tracking
from dprlhf.runs import trackers
from dprlhf.runs.folder import JsonLines, RunFolder
from dprlhf.runs.trackers import tracked
from helpers import runs, tiny

ROUNDS: list[dict[str, Any]] = [
    {"round": t, "released_gradient_norm": t / 7, "private_reward_noised": None} for t in (1, 2, 3)
]
CONFIG = {"privacy": {"epsilon": 4.0}, "rewards": [{"function": "f"}]}


class Fake(GeneralTracker):
    """Keeps what it gets; ``broken`` names the method that raises."""

    name = "fake"
    requires_logging_directory = False
    broken = ""
    got: list[tuple[Any, ...]]

    def __init__(self, project: str, /, **settings: Any) -> None:
        super().__init__()
        self._take("init", project, settings)

    def _take(self, what: str, *values: Any) -> None:
        self.got.append((what, *values))
        if what == self.broken:
            raise ConnectionError("the service is down")

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        self._take("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._take("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._take("log", values, step, kwargs)

    def finish(self) -> None:
        self._take("finish")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[Fake]]:
    def register(name: str, broken: str = "") -> type[Fake]:
        kind = type("Registered", (Fake,), {"broken": broken, "got": []})
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, kind)
        return kind

    monkeypatch.setattr(trackers, "check_installed", lambda names: None)
    return register


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def three_rounds(spec: Tracking, folder: RunFolder, after: Callable[[], None]) -> None:
    with tracked(spec, folder, CONFIG) as callbacks:
        for line in ROUNDS:
            JsonLines(folder.metrics).write(line)
            for callback in callbacks:
                callback(dict(line))
            after()


def logged(kind: type[Fake]) -> list[tuple[Any, ...]]:
    return [entry[1:] for entry in kind.got if entry[0] == "log"]


EXPECTED = [({"round": t, "released_gradient_norm": t / 7}, t) for t in (1, 2, 3)]


class TestWhatTheyGet:
    def test_all_rounds_together_at_the_end(self, fake, folder):
        kind, seen = fake("mlflow"), []
        three_rounds(Tracking(report_to="mlflow"), folder, lambda: seen.append(len(kind.got)))
        assert seen == [0, 0, 0]  # not even a start: its time would be there
        assert [(values, step) for values, step, _ in logged(kind)] == EXPECTED
        assert [entry[0] for entry in kind.got][-1] == "finish"
        assert ("config", {"privacy.epsilon": 4.0, "rewards.0.function": "f"}) in kind.got

    def test_tensorboard_is_live_and_sees_no_clock(self, fake, folder):
        kind, seen = fake("tensorboard"), []
        kind.requires_logging_directory = True
        three_rounds(
            Tracking(report_to="tensorboard"), folder, lambda: seen.append(len(logged(kind)))
        )
        assert seen == [1, 2, 3]
        assert [k for _, _, k in logged(kind)] == [{"walltime": float(t)} for t in (1, 2, 3)]
        assert kind.got[0] == ("init", "dprlhf", {"logging_dir": str(folder.path / "tracking")})

    def test_tensorboard_sees_a_clock_that_stands_still(self, fake, folder, monkeypatch):
        """It puts the time into names of files and folders, and into each file's first event."""
        kind, clocks = fake("tensorboard"), []
        monkeypatch.setattr(kind, "_take", lambda self, *_: clocks.append(time.time()))
        three_rounds(Tracking(report_to="tensorboard"), folder, lambda: None)
        assert set(clocks) == {0.0}
        assert time.time() > 0

    def test_wandb_watches_neither_machine_nor_terminal(self, fake, folder):
        kind = fake("wandb")
        three_rounds(Tracking(report_to="wandb"), folder, lambda: None)
        _, project, settings = kind.got[0]
        assert project == "dprlhf"
        assert settings["settings"] == {"x_disable_stats": True, "console": "off"}
        assert settings["name"] == "run"


class TestFailure:
    @pytest.mark.parametrize("broken", ["init", "start", "config", "log", "finish"])
    def test_a_tracker_that_is_down_is_named_once(self, fake, folder, capsys, broken):
        fake("wandb", broken)
        healthy = fake("trackio")
        three_rounds(Tracking(report_to=["wandb", "trackio"]), folder, lambda: None)
        warned = capsys.readouterr().err
        assert warned.count("tracker wandb failed (ConnectionError") == 1
        assert len(warned.splitlines()) == 1
        assert len(logged(healthy)) == 3


class TestRun:
    def test_metrics_and_settings_of_a_run(self, fake, tmp_path, monkeypatch, capsys):
        """A run whose live tracker dies in round 1 ends well, and the other gets all of it."""
        monkeypatch.setattr("dprlhf.runs.trackers.check_installed", lambda names: None)
        kind = fake("wandb")
        fake("tensorboard", "log")
        model = str(tiny.save(tmp_path / "model"))
        runs.train(
            model, tmp_path / "run", rounds=2, epsilon=8.0, delta=1e-3,
            tracking__report_to=["wandb", "tensorboard"],
        )  # fmt: skip
        lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert [step for _, step, _ in logged(kind)] == [1, 2]
        for (values, _, _), line in zip(logged(kind), lines, strict=True):
            assert values == {k: v for k, v in line.items() if isinstance(v, int | float)}
        [(_, config)] = [entry for entry in kind.got if entry[0] == "config"]
        assert config["policy.model_name_or_path"] == model
        assert config["plan.rounds"] == 2
        key = (tmp_path / "run/secret/key").read_bytes().hex()
        assert key not in str(kind.got)
        assert "secret" not in str(kind.got)
        assert "tracker tensorboard failed" in capsys.readouterr().err
