"""The algorithm in one file computes what the package does: a user's contribution, a step and ε."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import recipe
from dprlhf.policies.whole import WholePolicy
from dprlhf.privacy.accounting import Mechanism, epsilon
from dprlhf.rewards import Scores
from dprlhf.updates.pg import policy_gradient
from helpers import tiny
from helpers.batches import rows_of
from helpers.rounds import flat_parameters, round_of, set_parameters

FILE = Path(__file__).parents[2] / "examples" / "dp_policy_gradient.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("dp_policy_gradient", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_file_is_short_and_stands_alone() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    assert "import dprlhf" not in text
    assert "from dprlhf" not in text


@pytest.mark.parametrize("users", [1, 6])
def test_a_step_is_that_of_the_package(example, users, monkeypatch):
    """Some users are clipped and some are not, and some importance ratios are truncated."""
    settings = example.Settings(users=users, rounds=1, clip_norm=2.0, largest_ratio=1.05)
    monkeypatch.setattr("dprlhf.updates.pg.LARGEST_RATIO", settings.largest_ratio)
    base, current = example.make_policy(1).double(), example.make_policy(1).double()
    policy = WholePolicy(current, tiny.tokenizer())
    generator = torch.Generator().manual_seed(2)
    moved = flat_parameters(policy)
    moved = moved + 0.05 * torch.randn(moved.shape, generator=generator, dtype=torch.float64)
    set_parameters(policy, moved)
    prompts = example.make_prompts(users, generator)
    arms = torch.stack(
        [example.sample(base, prompts, generator), example.sample(current, prompts, generator)], 1
    )
    total = example.clipped_sum(current, base, prompts, arms, settings)
    norms = [
        float(example.user_gradient(current, base, p, a, settings.largest_ratio).norm())
        for p, a in zip(prompts, arms, strict=True)
    ]
    if users > 1:
        assert any(0 < norm < settings.clip_norm for norm in norms)
        assert max(norms) > settings.clip_norm

    rewards = example.reward(prompts.repeat_interleave(2, 0), arms.flatten(0, 1)).numpy()
    tokens = torch.cat([prompts.repeat_interleave(2, 0), arms.flatten(0, 1)], 1)
    arms_of = {"from_base": [True, False], "copies": 2}
    responses = rows_of(tokens, torch.ones_like(tokens), 2, example.RESPONSE, **arms_of)
    valid = np.ones(2 * users, dtype=bool)
    made, gate = round_of(
        policy, responses, Scores(rewards, valid, {}), clip_norm=settings.clip_norm,
        expected_batch_size=users, learning_rate=settings.learning_rate,
    )  # fmt: skip
    spec = recipe.PG.model_validate({"baseline": "paired", "batch_size": 3})
    policy_gradient(made, spec)
    torch.testing.assert_close(gate.sums[0].total, total, rtol=1e-6, atol=1e-7)

    after = flat_parameters(policy)
    set_parameters(policy, moved)
    example.step(current, total / users, settings.learning_rate)
    torch.testing.assert_close(flat_parameters(policy), after, rtol=1e-6, atol=1e-7)
    assert not torch.equal(after, moved)


def test_epsilon_is_that_of_the_package(example: Any) -> None:
    """The package's ε of one Gaussian is exact; the PLD's is an upper bound within 0.1%."""
    z = example.Settings().noise_multiplier
    exact = epsilon(Mechanism(z, 20, "fixed"), example.DELTA).epsilon
    assert exact * (1 - 1e-9) <= example.epsilon_of(z) <= exact * 1.001
    assert round(example.epsilon_of(z), 2) == 4.0


def test_a_run_learns(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example.train(example.Settings(users=300, rounds=3, noise_multiplier=0.0, learning_rate=6.0))
    means = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(means) == 3
    assert means[-1] > means[0] + 0.05
