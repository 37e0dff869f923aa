"""scripts/gpu_check.sh without a GPU: its options, what it refuses, and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/gpu_check.sh"

# Answers as an interpreter with a GPU would; {tests} is the exit status of the tests.
INTERPRETER = """#!/usr/bin/env bash
case "$*" in
  -) code=$(cat); case $code in
    *get_device_name*) {probe} ;;
    *) {real} - <<<"$code" ;;
  esac ;;
  "- "*) exec {real} "$@" ;;
  "-m pytest"*) echo "9 passed"; exit {tests} ;;
  scripts/bench.py*) echo done
    echo '[{{"name": "a ratio", "value": 1.04, "goal": "at most 1.05", "holds": true}},
    {{"name": "no goal", "value": 3, "goal": "", "holds": null}}]' >"${{@: -1}}" ;;
  *"assets pull"*) {assets} ;;
  "-m dprlhf train"*) echo "reward on 256 prompts: rise"; echo "run folder: here" ;;
esac
"""


def check(folder: Path, *options: str, **answers: str) -> subprocess.CompletedProcess[str]:
    if answers:
        defaults = {"probe": "echo 'An H1000, torch 2.13'", "tests": "0", "assets": "true"}
        interpreter = folder / "python"
        interpreter.write_text(INTERPRETER.format(**defaults | {"real": sys.executable} | answers))
        interpreter.chmod(0o755)
        results = folder / "bench.json"
        results.write_text('[{"name": "on a CPU", "value": 2}]')
        options = (
            "--python", str(interpreter), "--out", str(folder / "out"),
            "--results", str(results), *options,
        )  # fmt: skip
    return subprocess.run(
        ["bash", str(SCRIPT), *options], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_table_comes_last(tmp_path: Path) -> None:
    done = check(tmp_path, tests="0")
    assert done.returncode == 0, done.stderr
    *_, title, tests, imdb, reward, overhead, opacus, trl, ratio = done.stdout.splitlines()
    assert title.startswith("An H1000, torch 2.13 (logs in ")
    assert tests.split()[:2] == ["tests", "ok"]
    assert tests.endswith("9 passed")
    assert imdb.split()[:2] == ["imdb", "ok"]
    assert reward.strip() == "reward on 256 prompts: rise"
    steps = [line.split()[:2] for line in (overhead, opacus, trl)]
    assert steps == [["overhead", "ok"], ["opacus", "ok"], ["trl", "ok"]]
    assert ratio.split() == ["holds", "1.04", "a", "ratio", "(at", "most", "1.05)"]
    other, found, _ = json.loads((tmp_path / "bench.json").read_text())
    assert other == {"name": "on a CPU", "value": 2}
    assert found["command"] == "bash scripts/gpu_check.sh"  # no folder of this machine
    assert found["value"] == 1.04


def test_a_failure_and_what_cannot_be_fetched_are_in_the_table(tmp_path: Path) -> None:
    done = check(tmp_path, tests="1", assets="echo 'no network'; exit 2")
    assert done.returncode == 1
    lines = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if line}
    assert lines["tests"] == "FAILED"
    assert lines["imdb"] == "skipped"
    assert lines["opacus"] == "ok"
    assert "the demo's models cannot be had: no network" in done.stdout
