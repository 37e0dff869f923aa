"""The benchmark compares updates that do the same work."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench import models
from bench.overhead import clipped, plain


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
