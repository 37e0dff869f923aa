"""On a GPU: the same sums, the same noise, the same tokens. Skipped where there is none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dprlhf
from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Private, open_private
from dprlhf.gradients.clipping import ClippedSum, Weighted, clipped_sum
from dprlhf.gradients.ghost_norm import OuterProducts, add_weighted, square_norm
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger, read_ledger
from dprlhf.privacy.plan import make_plan
from dprlhf.rollout import Responses
from dprlhf.training.processes import Processes
from helpers import sampled, tiny
from helpers.policies import off_start
from helpers.rounds import value_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
GPU = "cuda"
TARGETS = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj", "up_proj"]}
TEXTS = ["a", "some longer text", "middle", "xy", "another of them", "the last one of all"]
KINDS = pytest.mark.parametrize("kind", ["gpt2", "llama"])


def policy_on(device, kind="gpt2", dtype=torch.float64):
    """The same policy on each device: its tokens are far from uniform, and A and B from zero."""
    model = tiny.model(kind)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(15)
    spec = recipe.Adapter(type="lora", rank=2, alpha=8.0, target_modules=TARGETS[kind])
    policy = off_start(make_policy(model, tiny.tokenizer(), spec))
    policy.model.to(device, dtype)
    return policy


def draw(policy: CausalLMPolicy, users: list[int], batch_size: int = 4) -> Responses:
    prompts = sampled.prompts_of([TEXTS[u] for u in users], users)
    settings = {"max_new_tokens": 8, "batch_size": batch_size, "temperature": 1.0}
    return sampled.draw(policy, prompts, **settings)


def tokens_of(responses: Responses) -> dict[int, list[list[int]]]:
    """Each user's responses."""
    found: dict[int, list[list[int]]] = {}
    for row, user in enumerate(responses.prompts.users[responses.prompt].tolist()):
        real = responses.response_mask[row].bool()
        found.setdefault(user, []).append(
            responses.tokens[row, -responses.max_new_tokens :][real].tolist()
        )
    return found


def clipped(policy: CausalLMPolicy, responses: Responses, clip_norm: float) -> ClippedSum:
    weights = np.random.default_rng(0).normal(size=len(responses.user))
    weighted = Weighted(responses, weights, np.zeros((responses.users, 0)), 0.0)
    return clipped_sum(
        policy, Private(weighted), clip_norm=clip_norm, batch_size=4, reduce=lambda total: total
    )


def everybody() -> list[int]:
    return list(range(len(TEXTS)))


# Llama's norms compute in float32 whatever the dtype of the model.
@pytest.mark.parametrize(("kind", "tolerance"), [("gpt2", 1e-9), ("llama", 1e-4)])
def test_the_clipped_sum_is_that_of_the_cpu_in_float64(kind: tiny.Kind, tolerance: float) -> None:
    responses = draw(policy_on("cpu", kind), everybody())
    expected = clipped(policy_on("cpu", kind), responses, clip_norm=1.0)
    found = clipped(policy_on(GPU, kind), responses, clip_norm=1.0)
    assert found.bounded.total.device.type == "cpu"
    assert expected.bounded.total.norm() > 0.1
    torch.testing.assert_close(
        found.bounded.total, expected.bounded.total, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(
        open_private(found.norms), open_private(expected.norms), rtol=10 * tolerance
    )


def test_norms_and_sums_of_factors_are_those_of_the_cpu() -> None:
    """What full fine-tuning keeps of a weight: wide layers, a tied embedding, a user left out."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, (6, 9), generator=draw)
    wide = [torch.randn(6, 9, width, generator=draw) for width in (300, 200, 200)]
    uses = [OuterProducts(wide[0], wide[1]), OuterProducts(tokens, wide[2])]
    factors = torch.tensor([0.5, 1.0, 0.0, 0.25, 1.0, 0.125], dtype=torch.float64)
    found = []
    for device in ("cpu", GPU):
        there = [OuterProducts(*(f.to(device) for f in use)) for use in uses]
        total = torch.zeros(300, 200, dtype=torch.float64, device=device)
        add_weighted(there, factors.to(device), total)
        found.append([x.cpu() for x in (*square_norm(there), total)])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-4)


@KINDS
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_in_bfloat16_norms_are_close_and_the_clip_norm_holds(kind, autocast):
    responses = draw(policy_on("cpu", kind), everybody())
    expected = open_private(clipped(policy_on("cpu", kind), responses, clip_norm=1.0).norms)
    policy = policy_on(GPU, kind, torch.float32 if autocast else torch.bfloat16)
    for clip_norm in (1e-3, 1.0):
        with torch.autocast(GPU, torch.bfloat16, enabled=autocast):
            found = clipped(policy, responses, clip_norm)
        np.testing.assert_allclose(open_private(found.norms), expected, rtol=0.2)
        for user in everybody():
            with torch.autocast(GPU, torch.bfloat16, enabled=autocast):
                alone = clipped(policy, draw(policy, [user]), clip_norm).bounded.total
            assert float(alone.norm()) <= clip_norm
    assert float(alone.norm()) > 0


def test_the_noise_is_that_of_the_cpu_to_the_bit(tmp_path: Path) -> None:
    responses = draw(policy_on("cpu"), everybody())
    plan = make_plan(users=100, rounds=1, delta=1e-3, noise_multiplier=1.0)
    noise = []
    for device in ("cpu", GPU):
        total = clipped(policy_on(device), responses, plan.clip_norm).bounded.total
        ledger = Ledger(tmp_path / f"{device}.jsonl", plan.terms())
        # The sums differ by rounding, so what is added to nothing is compared.
        nothing = BoundedSum(torch.zeros_like(total), plan.clip_norm)
        noise.append(value_of(Gate(plan, ledger, bytes(32)).release(1, nothing)))
        ledger.close()
    assert float(noise[0].std()) > 0
    assert torch.equal(*noise)


@KINDS
def test_tokens_are_those_of_the_cpu_whatever_the_batch_size(kind: tiny.Kind) -> None:
    truth = tokens_of(draw(policy_on("cpu", kind), everybody()))
    policy = policy_on(GPU, kind)
    for batch_size in (2, 4, 16):
        assert tokens_of(draw(policy, everybody(), batch_size)) == truth


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_user_is_the_same_to_the_bit_whoever_else_is_there(kind, dtype):
    policy = policy_on(GPU, kind, dtype)
    together = draw(policy, everybody(), batch_size=12)
    truth = tokens_of(together)
    for users in ([0], [5, 1], [2, 3, 4]):
        some = draw(policy, users, batch_size=12)
        assert tokens_of(some) == {u: truth[u] for u in users}
    norms = open_private(clipped(policy, together, 1.0).norms)
    for user in everybody():
        rows = np.flatnonzero(together.user == user)
        alone = draw(policy, [user], batch_size=12)
        weights = np.random.default_rng(0).normal(size=len(together.user))[rows]
        weighted = Weighted(alone, weights, np.zeros((1, 0)), 0.0)
        found = clipped_sum(
            policy, Private(weighted), clip_norm=1.0, batch_size=4, reduce=lambda total: total
        )
        assert open_private(found.norms)[0] == norms[user]


def test_a_whole_run(tmp_path: Path) -> None:
    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [len(text.encode()) / 8 for text in completions]

    assert Processes.connect().device.type == GPU
    result = dprlhf.train(
        model=str(tiny.save(tmp_path / "model")), prompts=[f"user {i} says" for i in range(40)],
        reward=reward, policy__adapter={"type": "lora", "rank": 2, "target_modules": ["c_attn"]},
        policy__dtype="bfloat16", epsilon=8.0, delta=1e-2, rounds=2, rollout__max_new_tokens=4,
        output_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert result.policy.device.type == GPU
    kinds = [entry.kind for entry in read_ledger(tmp_path / "run/ledger.jsonl")]
    assert kinds == ["open", "charge", "commit", "charge", "commit"]


def test_rows_longer_than_a_block_of_fused_attention_train(tmp_path: Path) -> None:
    """Its backward pass adds up blocks in an order of chance unless it is told not to."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
    config = LlamaConfig(**{**tiny.SMALL, **sizes, "head_dim": 64, "max_position_embeddings": 1024})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    dprlhf.train(
        model=str(tmp_path / "model"), prompts=[f"user {i} says " * 60 for i in range(40)],
        reward=lambda prompts, completions, **columns: [float(len(c)) for c in completions],
        policy__adapter={"type": "lora", "rank": 2, "target_modules": ["q_proj", "v_proj"]},
        policy__dtype="bfloat16", data__max_prompt_tokens=600, epsilon=8.0, delta=1e-2, rounds=2,
        rollout__max_new_tokens=64, output_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    kinds = [entry.kind for entry in read_ledger(tmp_path / "run/ledger.jsonl")]
    assert kinds == ["open", "charge", "commit", "charge", "commit"]
