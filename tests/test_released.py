"""What did not go through the gate is refused: while it runs, and by mypy before."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Private, Released, open_released, post_process
from dprlhf.policies.optimizers import ascend
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.plan import make_plan
from dprlhf.rewards import Scores
from dprlhf.training.rounds import released_metrics
from dprlhf.updates import UPDATES
from dprlhf.updates.telemetry import TelemetryCoordinates
from helpers.batches import Shape, batch_of
from helpers.policies import policy_of
from helpers.rounds import round_of, value_of

PLAN = make_plan(users=100, rounds=10, delta=1e-5, epsilon=4.0, clip_norm=0.5)
PARAMETER = torch.zeros(2, requires_grad=True)
OPTIMIZER = torch.optim.SGD([PARAMETER], lr=1.0)
VECTOR = torch.ones(2, dtype=torch.float64)


def test_map_and_split_stay_released() -> None:
    released = Released(torch.arange(5.0), 3)
    doubled = released.map(lambda x: 2 * x)
    assert doubled.t == 3
    assert value_of(doubled).tolist() == [0, 2, 4, 6, 8]
    first, none, rest = doubled.split([2, 0, 3])
    assert [value_of(x).tolist() for x in (first, none, rest)] == [[0, 2], [], [4, 6, 8]]
    assert {x.t for x in (first, none, rest)} == {3}
    assert "6." not in repr(doubled)


def test_a_computation_on_released_values_is_released() -> None:
    found = post_process(lambda read: read(Released(VECTOR, 4)) + read(Released(VECTOR, 4)))
    assert found.t == 4
    assert value_of(found).tolist() == [2, 2]
    with pytest.raises(TypeError, match="read no Released value"):
        post_process(lambda read: VECTOR)


def a_round() -> Any:
    policy = policy_of("gpt2", "ffa-lora")
    responses = batch_of(Shape([[5], [2]], k=2, length=3), seed=1)
    count = len(responses.user)
    scores = Scores(np.linspace(-1, 2, count), np.ones(count, dtype=bool), {})
    return round_of(policy, responses, scores, clip_norm=0.5)[0]


TAKES_RELEASED: dict[str, Callable[[Any], Any]] = {
    "ascend": lambda x: ascend([PARAMETER], OPTIMIZER, x),
    "step": lambda x: a_round().step(x),
    "telemetry": lambda x: TelemetryCoordinates(0.1, 3.0).read(x, 1),
    "released_metrics": lambda x: released_metrics(SimpleNamespace(plan=PLAN), 1, x),  # type: ignore[arg-type]
    "open_released": lambda x: open_released(x, "a test"),
    "post_process": lambda x: post_process(lambda read: read(x)),
}


@pytest.mark.parametrize("raw", [VECTOR, BoundedSum(VECTOR, 0.5), Private(VECTOR), None])
@pytest.mark.parametrize("name", TAKES_RELEASED)
def test_what_was_not_released_is_refused(name: str, raw: Any) -> None:
    before = PARAMETER.detach().clone()
    with pytest.raises(TypeError, match="takes a Released value, which only the gate makes, not"):
        TAKES_RELEASED[name](raw)
    assert torch.equal(PARAMETER, before)


@pytest.mark.parametrize("name", [n for n in TAKES_RELEASED if n != "step"])
def test_what_was_released_is_taken(name: str) -> None:
    TAKES_RELEASED[name](Released(VECTOR, 1))


def test_the_gate_takes_what_was_clipped(tmp_path: Path) -> None:
    gate = Gate(PLAN, Ledger(tmp_path / "ledger.jsonl", PLAN.terms()), bytes(32))
    for raw in (VECTOR, Released(VECTOR, 1), Private(VECTOR)):
        with pytest.raises(TypeError, match="takes a BoundedSum, which only the clipping code"):
            gate.release(1, raw)  # type: ignore[arg-type]
    assert [e.kind for e in gate.ledger.entries].count("charge") == 0
    gate.ledger.close()


def test_a_round_releases_what_was_clipped() -> None:
    for raw in (VECTOR, BoundedSum(VECTOR, 0.5), Released(VECTOR, 1)):
        with pytest.raises(TypeError, match="takes a ClippedSum, which only the clipping code"):
            a_round().release(raw)


SPECS: dict[str, Any] = {
    "pg": recipe.PG(name="pg"),
    "grpo": recipe.GRPO(name="grpo"),
    "ppo": recipe.PPO(name="ppo"),
    "rebel": recipe.REBEL(name="rebel"),
    "rebel, gauss-newton": recipe.REBEL(name="rebel", oracle=recipe.Oracle()),
    "npg": recipe.NPG(name="npg"),
}


@pytest.mark.parametrize("name", SPECS)
def test_no_update_steps_along_what_a_broken_gate_gives_out(name: str) -> None:
    """The gate returns the sum as it is, the first time or (for several steps) later."""
    for good in (0, 1):
        round_ = a_round()
        answers = iter([True] * good)
        policy_before = {n: p.detach().clone() for n, p in round_.policy.parameters.items()}

        def gate(bounded: BoundedSum, answers: Any = answers) -> Any:
            zero = torch.zeros_like(bounded.total)
            return Released(zero, 1) if next(answers, False) else bounded.total

        round_.gate = gate
        spec = SPECS[name]
        releases = spec.releases
        if good >= releases:
            continue
        with pytest.raises(TypeError, match="takes a Released value, which only the gate makes"):
            UPDATES[spec.name](round_, spec)
        for n, p in round_.policy.parameters.items():
            assert torch.equal(p, policy_before[n])


SNIPPET = """
import torch
from dprlhf.boundary import BoundedSum, Private, Released, open_released, post_process
from dprlhf.gradients.clipping import ClippedSum
from dprlhf.policies.optimizers import ascend
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.plan import Plan
from dprlhf.rewards import Scores
from dprlhf.training.rounds import released_metrics
from dprlhf.training.run import Run
from dprlhf.updates.round import PrivateRound
from dprlhf.updates.telemetry import TelemetryCoordinates

class Plain: ...

def f(
    raw: RAW, summed: SUMMED, clipped: CLIPPED, round_: PrivateRound, gate: Gate, plan: Plan,
    telemetry: TelemetryCoordinates, run: Run,
    parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer,
) -> None:
    ascend(parameters, optimizer, raw)
    round_.step(raw)
    telemetry.read(raw, 1)
    released_metrics(run, 1, raw)
    open_released(raw, "here")
    post_process(lambda read: read(raw))
    gate.release(1, summed)
    round_.release(clipped)
"""


CONFIG = """
[mypy]
mypy_path = src
strict = true
follow_imports = silent
ignore_missing_imports = true
[mypy-dprlhf.*,LARGE]
follow_imports = skip
[mypy-ASKED]
follow_imports = silent
"""
LARGE = (
    "accelerate", "cryptography", "datasets", "huggingface_hub", "numpy", "pandas", "peft",
    "pydantic", "rich", "scipy", "sqlalchemy", "tokenizers", "torch", "transformers", "typer",
)  # fmt: skip
"""Read as Any, for time: only types of this project are asked about, those of ``ASKED``."""
ASKED = (
    "boundary", "gradients.clipping", "policies.optimizers", "privacy.gate", "training.rounds",
    "training.run", "updates.round", "updates.telemetry",
)  # fmt: skip


def mypy(tmp_path: Path, variants: dict[str, dict[str, str]]) -> dict[str, set[int]]:
    """Return the lines of the snippet that mypy refuses with each variant of its types."""
    files = {}
    for variant, types in variants.items():
        source = SNIPPET
        for name, kind in types.items():
            source = source.replace(f": {name}", f": {kind}")
        files[variant] = tmp_path / f"{variant}.py"
        files[variant].write_text(source)
    config = tmp_path / "mypy.ini"
    asked = ",".join(f"dprlhf.{name}" for name in ASKED)
    large = ",".join(f"{name}.*" for name in LARGE)
    config.write_text(CONFIG.replace("LARGE", large).replace("ASKED", asked))
    told = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", os.devnull,
         *map(str, files.values())],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode in (0, 1), told.stderr
    lines = [x for x in told.stdout.splitlines() if "error:" in x]
    found = {
        variant: {int(x.split(":")[1]) for x in lines if x.startswith(f"{file}:")}
        for variant, file in files.items()
    }
    assert all("[arg-type]" in x for x in lines), told.stdout
    assert all(x.startswith(tuple(map(str, files.values()))) for x in lines), told.stdout
    return found


@pytest.mark.slow
def test_mypy_refuses_what_was_not_released(tmp_path: Path) -> None:
    plain = "Plain"  # as a tensor would be, were it not Any
    good = {"RAW": "Released[torch.Tensor]", "SUMMED": "BoundedSum", "CLIPPED": "ClippedSum"}
    calls = {n for n, line in enumerate(SNIPPET.splitlines(), 1) if line.startswith("    ")}
    calls -= {n for n in calls if SNIPPET.splitlines()[n - 1].endswith(",")}
    assert len(calls) == 8
    variants = {"good": good}  # the control
    for variant, raw in (
        ("raw", plain), ("summed", "BoundedSum"), ("private", "Private[Plain]"),
    ):  # fmt: skip
        clipped = "BoundedSum" if raw == "BoundedSum" else raw
        summed = plain if raw == "BoundedSum" else raw
        variants[variant] = {"RAW": raw, "SUMMED": summed, "CLIPPED": clipped}
    expected = dict.fromkeys(variants, calls) | {"good": set()}
    assert mypy(tmp_path, variants) == expected
