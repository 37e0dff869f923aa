"""The benchmark's measuring helpers: alternation, medians, peak memory, equal work."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench import against_opacus, against_trl, models, overhead
from bench.measure import Turns, interleaved, ratio, resident_bytes
from bench.overhead import clipped, plain
from helpers import peaks

SCRIPTS = str(Path(__file__).parents[2] / "scripts")


def test_sides_alternate_and_the_first_call_is_not_counted() -> None:
    calls: list[str] = []
    sides = {name: (lambda n=name: calls.append(n)) for name in ("a", "b")}
    seconds = interleaved(sides, repeats=2)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


def test_loops_take_turns_and_the_first_lap_is_left_out() -> None:
    steps: list[str] = []

    def loop(name: str) -> Callable[[Callable[[], None]], None]:
        def run(lap: Callable[[], None]) -> None:
            for step in range(3):
                steps.append(f"{name}{step}")
                lap()

        return run

    turns = Turns({"a": loop("a"), "b": loop("b")})
    turns.run()
    assert steps == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert {name: len(laps) for name, laps in turns.laps.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_of_pairs_with_its_quartiles() -> None:
    rows = ratio("r", [2.0, 9.0, 4.0, 8.0, 5.0], [2.0, 3.0, 2.0, 2.0, 1.0], at_most=2.5)
    assert [row.value for row in rows] == [3.0, 2.0, 4.0]  # of 1, 3, 2, 4, 5
    assert [row.holds for row in rows] == [False, None, None]
    assert ratio("r", [3.0], [1.0], at_least=3.0)[0].holds is True


@pytest.mark.slow
def test_peak_memory_counts_what_exists_at_once() -> None:
    # In a process of its own: what other tests freed may be handed out again.
    path = os.pathsep.join([SCRIPTS, *sys.path])
    done = subprocess.run(
        [sys.executable, peaks.__file__], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    least = float(done.stdout)
    # 31; the kernel may hand out ten more for the zeros. Without NumPy's arrays it would be 16, and
    # 46 if nothing were given back.
    assert least == pytest.approx(31, abs=11)


def test_shared_storage_is_resident_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    assert resident_bytes(model, optimizer) == 4 * (64 + 2 * 8)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    steps = 3 * 4  # Adam keeps one number of steps for each of the three parameters
    assert resident_bytes(model, optimizer) == 3 * 4 * (64 + 2 * 8) + steps


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_both_updates_do_the_same_work(kind: models.Kind, full: bool) -> None:
    """Without anything to clip, the sum over users is the plain gradient."""
    policy = models.policy(models.causal_lm(kind, small=True), kind, full=full)
    batch = models.responses(users=2, each=2, prompt=16, response=4)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64).numpy()
    total = clipped(policy, batch, weights, 1e9).bounded.total
    plain(policy, batch, weights)
    gradients = torch.cat([p.grad.flatten() for p in policy.parameters.values()])
    torch.testing.assert_close(total, gradients.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_comparison_with_trl_runs_and_all_sides_do_the_same_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the eight sides scores the same prompts, two responses each, in both of its steps."""
    scored: list[str] = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        scored.extend(prompt for prompt in prompts if prompt.startswith("Film"))
        return [-float(len(text)) for text in completions]

    monkeypatch.setattr(against_trl, "reward", reward)
    monkeypatch.setattr(against_trl, "WORKS", {"cpu": {"": against_trl.Work(4, 2, 16, 12, 8)}})
    rows = list(against_trl.results(quick=True, device="cpu", repeats=1))
    assert [row.name.split(":")[0] for row in rows] == [
        "a TRL step (RLOO, bfloat16) over a private round, bfloat16",
        "a TRL step (GRPO, bfloat16) over a private round, bfloat16",
        "private round, bfloat16", "RLOO, bfloat16", "GRPO, bfloat16",
        "a TRL step (RLOO, as it comes) over a private round, as it comes",
        "private round, as it comes", "RLOO, as it comes",
        "a TRL step (RLOO) over a private round", "a TRL step (GRPO) over a private round",
        "private round", "RLOO", "GRPO",
    ]  # fmt: skip
    assert all(row.value > 0 and math.isfinite(row.value) for row in rows)
    assert len(set(scored)) == 2 * 4
    assert len({scored.count(prompt) for prompt in scored}) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_other_comparisons_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case: Any = ("llama", "LoRA")
    monkeypatch.setattr(overhead, "GOALS", {case: (None, None)})
    monkeypatch.setattr(against_opacus, "CASES", [case])
    options: Any = {"quick": True, "device": "cpu", "repeats": 1}
    rows = [*overhead.results(**options), *against_opacus.results(**options)]
    assert all(math.isfinite(row.value) for row in rows)
    same = [row for row in rows if "relative difference" in row.name]
    assert len(same) == 2
    assert all(row.holds for row in same)
