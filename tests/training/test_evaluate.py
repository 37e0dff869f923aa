"""Evaluation on public prompts: what it measures beside the reward, and what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dprlhf
from dprlhf.data.public import in_memory_prompts
from dprlhf.policies.causal_lm import CausalLMPolicy, make_policy
from dprlhf.rollout import Responses, sample
from dprlhf.training.evaluate import drift_metrics
from helpers import runs, tiny

PUBLIC = [f"public {'x' * i}" for i in range(12)]
TEMPERATURE = 0.7


def policy_and_responses(moved: float) -> tuple[CausalLMPolicy, Responses]:
    policy = make_policy(
        tiny.model(),
        tiny.tokenizer(),
        dprlhf.recipe.Adapter(rank=4, target_modules="all-linear"),
        temperature=TEMPERATURE,
    )
    policy.end_tokens = list(range(40))  # so that some responses end before the limit
    with torch.no_grad():
        for number, parameter in enumerate(policy.parameters.values()):
            noise = torch.Generator().manual_seed(number)
            parameter += moved * torch.randn(parameter.shape, generator=noise)
    spec = dprlhf.recipe.Rollout(max_new_tokens=9, batch_size=4)
    responses = sample(
        policy, in_memory_prompts(PUBLIC), spec.model_copy(update={"responses": 1}),
        key=bytes(32), context=("test",), max_prompt_tokens=32,
    )  # fmt: skip
    return policy, responses


def test_kl_is_zero_before_training() -> None:
    policy, responses = policy_and_responses(0.0)
    assert drift_metrics(policy, responses, 8)["public_kl"] == 0.0


def test_against_a_direct_computation() -> None:
    """One response at a time, without padding and from whole rows of logits."""
    policy, responses = policy_and_responses(0.3)
    ratios, lengths, ended = [], [], []
    for row in range(len(PUBLIC)):
        real = responses.tokens[row][responses.mask[row].bool()]
        length = int(responses.response_mask[row].sum())
        total = []
        for base in (False, True):
            with torch.no_grad():
                if base:
                    with policy.base():
                        logits = policy.model(real[None]).logits[0]
                else:
                    logits = policy.model(real[None]).logits[0]
            logprobs = (logits.double() / TEMPERATURE).log_softmax(1)[-length - 1 : -1]
            total.append(float(logprobs.gather(1, real[-length:, None]).sum()))
        ratios.append(total[0] - total[1])
        lengths.append(length)
        ended.append(int(real[-1]) < 40)
    assert 0 < sum(ended) < len(PUBLIC)
    assert max(map(abs, ratios)) > 0.05
    mean = {
        "public_response_tokens": sum(lengths) / len(PUBLIC),
        "public_ended_share": sum(ended) / len(PUBLIC),
        "public_kl": sum(ratios) / len(PUBLIC),
    }
    assert drift_metrics(policy, responses, 8) == pytest.approx(mean, abs=1e-5)


def test_a_run_tells_it_at_each_evaluation(tmp_path: Path) -> None:
    model = str(tiny.save(tmp_path / "model"))
    runs.train(
        model, tmp_path / "run", rounds=4, epsilon=8.0, delta=1e-3, optimizer__learning_rate=0.1,
        evaluation_prompts=PUBLIC, evaluation__every=2,
    )  # fmt: skip
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "public_kl" in line] == [2]
    assert lines[1]["public_kl"] != 0.0
    assert 1 <= lines[1]["public_response_tokens"] <= 6
    assert 0 <= lines[1]["public_ended_share"] <= 1
    kept = (tmp_path / "run/public-samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in kept]
    assert [(s["round"], s["prompt"]) for s in samples] == [(2, prompt) for prompt in PUBLIC[:5]]
    assert all({"response", "reward"} < s.keys() for s in samples)
