"""Which families of transformers' causal language models train, and how exactly.

For each family a tiny random model takes two private rounds: with LoRA on all linear layers, with
all weights, and with LoRA and gradient checkpointing. Before that, each user's gradient is compared
with autograd's on one row after the other, and the probabilities that sampling draws by with those
of the model on the sequence alone. Last comes what it costs that each pass of a mixture of experts
has the rows of one user: the time of a run beside that of one which shares passes. Prints a line
for each cell and writes rows to ``docs/results/review.json``, in about ten minutes on one core::

    python -m scripts.review.architectures [FAMILY ...]
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import dprlhf
from dprlhf.errors import DprlhfError
from dprlhf.privacy.ledger import read_ledger
from dprlhf.runs.measurements import Result, at_most, write_results
from helpers import families, runs, tiny
from helpers.autograd import relative_error

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "review.json"

CELLS: dict[str, tuple[str, bool]] = {
    "LoRA on all linear layers": ("lora", False),
    "all weights": ("full", False),
    "LoRA and gradient checkpointing": ("lora", True),
}
TOLERANCE = 1e-4
"""On a gradient's relative error and a log-probability's error, in float32."""


def errors(kind: str, adapter: str, checkpoints: bool) -> tuple[float, float]:
    """Return the relative error of users' gradients, and the largest of log-probabilities."""
    policy = families.policy(kind, adapter)
    if checkpoints:
        policy.checkpoint_layers()
    sampled = families.sampled_logprobs(policy)
    padded = families.padded_logprobs(policy, [response for response, _ in sampled])
    worst = 0.0
    for prompt, (response, drawn), of_pass in zip(families.PROMPTS, sampled, padded, strict=True):
        plain = families.plain_logprobs(policy, prompt, response)
        worst = max(worst, *(float((x - plain).abs().max()) for x in (drawn, of_pass)))
    return relative_error(*families.gradients(policy)), worst


def private_rounds(kind: str, adapter: str, checkpoints: bool, folder: Path) -> None:
    """Make two private rounds, and check that weights move and that the budget is spent."""
    spec: dict[str, Any] = {"type": adapter}
    if adapter == "lora":
        spec |= {"rank": 2, "target_modules": "all-linear"}
    model = families.model(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = dprlhf.train(
        model=model, processing_class=tiny.tokenizer(),
        prompts=[f"user {i} says" for i in range(24)], reward=runs.lower_case, epsilon=8.0,
        rounds=2, learning_rate=0.05, policy__adapter=spec, data__max_prompt_tokens=12,
        policy__gradient_checkpointing=checkpoints, rollout__max_new_tokens=4,
        rollout__batch_size=16, update__batch_size=16, quiet=True, output_dir=folder,
    )  # fmt: skip
    assert 0 < result.plan.guarantee.epsilon <= 8.0
    charged = [entry for entry in read_ledger(result.folder.ledger) if entry.kind == "charge"]
    assert len(charged) == 2
    if adapter == "lora":
        moved = [p for name, p in result.policy.parameters.items() if "lora_B" in name]
        assert all(bool(p.any()) for p in moved)
    else:
        assert not all(p.equal(before[name]) for name, p in result.policy.parameters.items())


def cell(kind: str, adapter: str, checkpoints: bool, folder: Path) -> tuple[str, float]:
    """Return what became of a cell, ``trains`` or why not, and the error of users' gradients."""
    try:
        gradient, logprob = errors(kind, adapter, checkpoints)
        private_rounds(kind, adapter, checkpoints, folder)
    except DprlhfError as error:
        return f"refused: {error}", 0.0
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}", 0.0
    if max(gradient, logprob) > TOLERANCE:
        return f"fails: gradient off by {gradient:.1e}, log-probability by {logprob:.1e}", gradient
    return "trains", gradient


def time_of_experts(apart: bool, folder: Path) -> float:
    """Return the processor time in seconds of two rounds, 32 users each, of a small Mixtral."""
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    found: list[float] = []
    mixing = mock.patch("dprlhf.policies.refusals.mixing_layers", return_value=())
    checked = mock.patch("dprlhf.training.build.check_layout", return_value="")
    with checked, contextlib.nullcontext() if apart else mixing:
        dprlhf.train(
            model=families.model("mixtral", num_local_experts=8, **size),
            processing_class=tiny.tokenizer(), reward=runs.lower_case, epsilon=8.0, rounds=2,
            prompts=[f"user {i} says" for i in range(64)], quiet=True, output_dir=folder,
            policy__adapter={"type": "lora", "target_modules": ["q_proj", "v_proj"]},
            data__max_prompt_tokens=16, rollout__max_new_tokens=16, evaluation=None,
            callbacks=[lambda *given: found.append(time.process_time())],
        )  # fmt: skip
    return found[-1] - found[0]


def row_of_experts() -> Result:
    """Return the times of two runs each, in turns, as a ratio."""
    with tempfile.TemporaryDirectory() as base:
        times = {
            apart: min(time_of_experts(apart, Path(base, f"{apart}-{turn}")) for turn in range(2))
            for apart in (True, False)
        }
    name = "architectures: time of a small Mixtral's round with one user a pass over shared passes"
    return Result(name, times[True] / times[False], "1")


def main() -> None:
    """Try every cell, or those of the families named on the command line, and write the rows."""
    warnings.simplefilter("ignore")
    kinds = sys.argv[1:] or [*families.FAMILIES, *families.COMPOSITE]
    rows = []
    with tempfile.TemporaryDirectory() as base:
        for name, (adapter, checkpoints) in CELLS.items():
            found = {}
            for number, kind in enumerate(kinds):
                folder = Path(base) / f"{adapter}-{checkpoints}-{number}"
                found[kind] = cell(kind, adapter, checkpoints, folder)
                print(f"{name}: {kind}: {found[kind][0]}", flush=True)
            for outcome in ("trains", "refused", "fails"):
                count = sum(text.startswith(outcome) for text, _ in found.values())
                goal = ("0", count == 0) if outcome == "fails" else ()
                rows.append(Result(f"architectures: {outcome}, {name}", count, "families", *goal))
            worst = max((e for text, e in found.values() if text == "trains"), default=0.0)
            of = f"architectures: largest relative error of a user's gradient, {name}"
            rows.append(at_most(of, worst, "1", TOLERANCE))
    if not sys.argv[1:]:
        write_results(OUT, [*rows, row_of_experts()])


if __name__ == "__main__":
    main()
