"""Times of a run's files are a function of their content and of the day, never of the clock."""

import calendar
import os
import time
from pathlib import Path

from dprlhf.privacy import file_times
from dprlhf.privacy.file_times import first_day, stamp, stamp_run
from dprlhf.privacy.ledger import Ledger
from dprlhf.runs.folder import (
    JsonLines,
    RunFolder,
    append_secret,
    replaced_folder,
    write_atomically,
    write_json,
)

DAY = 86_400  # seconds


def times(folder: Path) -> dict[str, float]:
    """Return the modification times of all that can be seen of a run folder."""
    seen = {p for p in folder.rglob("*") if p.parent.name != "secret"}
    return {str(p.relative_to(folder)): p.stat().st_mtime for p in (folder, *seen)}


def written(folder: RunFolder) -> dict[str, float]:
    """Write something through each of the writers, and return the times of it all."""
    folder.create(key=bytes(32))
    write_atomically(folder.recipe, "rounds: 1\n")
    write_json(folder.privacy, {"epsilon": 1})
    for t in (1, 2):
        JsonLines(folder.metrics).write({"round": t})
        append_secret(folder.secret / f"telemetry-{t}.jsonl", f"{t}\n")
        with replaced_folder(folder.checkpoint) as fresh:
            (fresh / "deeper").mkdir()
            (fresh / "deeper" / "state.json").write_text(str(t))
    return times(folder.path)


def test_two_runs_of_the_same_content_have_the_same_times(tmp_path, monkeypatch):
    one = written(RunFolder(tmp_path / "one"))
    time.sleep(0.01)
    other = written(RunFolder(tmp_path / "other"))
    assert len(one) == 8
    assert one == other
    today = time.time() // DAY * DAY
    assert all(today - 2 * DAY <= t < today for t in one.values())  # never in the future
    assert len(set(one.values())) > 3


def test_a_change_of_content_changes_the_time(tmp_path: Path) -> None:
    """A tool that copies what changed since it last looked must see each checkpoint."""
    folder = RunFolder(tmp_path / "run")
    before = written(folder)
    with replaced_folder(folder.checkpoint) as fresh:
        (fresh / "state.json").write_text("3")
    JsonLines(folder.metrics).write({"round": 3})
    after = times(folder.path)
    assert after["checkpoint/state.json"] not in before.values()
    assert after["metrics.jsonl"] != before["metrics.jsonl"]
    assert after["privacy.json"] == before["privacy.json"]


def test_the_ledger_is_stamped_with_each_entry(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_atomically(folder.recipe, "rounds: 2\n")
    terms = {"rounds": 2, "noise_multiplier": 1.0, "clip_norm": 1.0, "releases_per_round": 1}
    ledger = Ledger(folder.ledger, terms)
    for t in (1, 2):
        ledger.charge(t, noise_multiplier=1.0, clip_norm=1.0)
        seconds = folder.ledger.stat().st_mtime
        assert seconds == int(seconds) < time.time() // DAY * DAY
        ledger.commit(t)
        seconds = folder.ledger.stat().st_mtime
        assert seconds == int(seconds) < time.time() // DAY * DAY
    ledger.close()


def test_a_killed_run_is_stamped_when_it_is_opened_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    before = written(folder)
    for path in (folder.metrics, folder.checkpoint, folder.secret, folder.path):
        os.utime(path)
    assert times(folder.path) != before
    stamp_run(folder.path)
    assert times(folder.path) == before


def test_what_belongs_to_no_run_keeps_its_time(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()  # somebody's folder of that name
    write_json(tmp_path / "data.json", [])
    before = (tmp_path / "data.json").stat().st_mtime
    stamp(tmp_path / "data.json")
    assert (tmp_path / "data.json").stat().st_mtime == before > time.time() - 60


def test_the_first_day_is_kept_when_a_run_goes_on(tmp_path, monkeypatch):
    began = calendar.timegm((2026, 1, 31, 23, 59, 0))
    monkeypatch.setattr(file_times, "_STARTED", began)
    root = tmp_path / "run"
    (root / "secret").mkdir(parents=True)
    (root / "secret/key").write_bytes(bytes(32))
    assert first_day(root) == "2026-01-31"
    (root / "recipe.yaml").write_text("rounds: 1\n")
    os.utime(root / "recipe.yaml", (began - 86_400,) * 2)  # as the first program stamped it
    monkeypatch.setattr(file_times, "_STARTED", began + 9 * 86_400)  # resumed days later
    stamp_run(root)
    assert first_day(root) == "2026-01-31"
