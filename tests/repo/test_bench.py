"""The benchmark's measuring helpers: alternation, medians, peak memory, equal work."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench import against_trl, models
from bench.measure import interleaved, ratio
from bench.overhead import clipped, plain


def test_sides_alternate_and_the_first_call_is_not_counted() -> None:
    calls: list[str] = []
    sides = {name: (lambda n=name: calls.append(n)) for name in ("a", "b")}
    seconds = interleaved(sides, repeats=2)
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_of_pairs_with_its_quartiles() -> None:
    rows = ratio("r", [2.0, 9.0, 4.0, 8.0, 5.0], [2.0, 3.0, 2.0, 2.0, 1.0], at_most=2.5)
    assert [row.value for row in rows] == [3.0, 2.0, 4.0]  # of 1, 3, 2, 4, 5
    assert [row.holds for row in rows] == [False, None, None]
    assert ratio("r", [3.0], [1.0], at_least=3.0)[0].holds is True


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
