"""Evaluation on public prompts: what it measures beside the reward, and what it keeps."""

import json
import math
from pathlib import Path

import pytest
import torch

import dprlhf
from dprlhf.data.public import in_memory_prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rollout import Responses, sample
from dprlhf.training.evaluate import (
    PolicyEstimate,
    RewardEstimate,
    compare,
    distinct,
    drift_warnings,
    measure,
    token_logs,
)
from helpers import runs, tiny
from helpers.policies import off_start

PUBLIC = [f"public {'x' * i}" for i in range(12)]
TEMPERATURE = 0.7


def policy_and_responses(moved: float) -> tuple[CausalLMPolicy, Responses]:
    policy = make_policy(
        tiny.model(), tiny.tokenizer(), dprlhf.recipe.Adapter(rank=4, target_modules="all-linear"),
        temperature=TEMPERATURE,
    )  # fmt: skip
    policy.end_tokens = list(range(40))  # so that some responses end before the limit
    off_start(policy, moved)
    spec = dprlhf.recipe.Rollout(max_new_tokens=9, batch_size=4)
    responses = sample(
        policy, in_memory_prompts(PUBLIC), spec.model_copy(update={"responses": 1}),
        key=bytes(32), context=("test",), max_prompt_tokens=32,
    )  # fmt: skip
    return policy, responses


def test_against_a_direct_computation() -> None:
    """One response at a time, without padding; the likelihood is transformers' own loss."""
    policy, responses = policy_and_responses(0.3)
    ratios, lengths, ended, losses, k3 = [], [], [], [], []
    for row in range(len(PUBLIC)):
        real = responses.tokens[row][responses.mask[row].bool()]
        length = int(responses.response_mask[row].sum())
        found = []
        for base in (False, True):
            with torch.no_grad():
                if base:
                    with policy.base():
                        labels = real.clone()
                        labels[:-length] = -100
                        output = policy.model(real[None], labels=labels[None])
                        losses.append(length * float(output.loss))
                        logits = output.logits[0]
                else:
                    logits = policy.model(real[None]).logits[0]
            logprobs = (logits.double() / TEMPERATURE).log_softmax(1)[-length - 1 : -1]
            found.append(logprobs.gather(1, real[-length:, None])[:, 0])
        ratios.append(float((found[0] - found[1]).sum()))
        back = found[1] - found[0]
        k3.append(float((back.exp() - back - 1).sum()))
        lengths.append(length)
        ended.append(int(real[-1]) < 40)
    assert 0 < sum(ended) < len(PUBLIC)
    assert max(map(abs, ratios)) > 0.05
    expected = {
        "response_tokens": sum(lengths) / len(PUBLIC), "ended_share": sum(ended) / len(PUBLIC),
        "distinct_1": distinct(responses.texts, 1), "distinct_2": distinct(responses.texts, 2),
        "kl": sum(ratios) / len(PUBLIC), "kl_per_token": sum(k3) / sum(lengths),
        "perplexity": math.exp(sum(losses) / sum(lengths)),
    }  # fmt: skip
    measured = measure(policy, responses, token_logs(policy, responses, 8))
    assert {n: e.mean for n, e in measured.items()} == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert policy.temperature == TEMPERATURE
    assert measure(policy, responses, None).keys() == set(list(expected)[:4])


def test_a_win_rate_by_hand() -> None:
    """Two wins, one tie, one loss, and one prompt that has no score before."""
    import numpy as np
    from scipy.stats import binomtest

    before = np.array([0.0, 0.0, 0.0, 1.0, np.nan])
    after = np.array([1.0, 2.0, 0.0, 0.0, 5.0])
    rate = compare(before, after).win_rate
    assert (rate.rate, rate.ties, rate.prompts) == (2.5 / 4, 1, 4)
    assert compare(before, after).difference.mean == pytest.approx(0.5)
    whole = compare(np.zeros(10), np.array([1.0] * 7 + [-1.0] * 3)).win_rate
    wilson = binomtest(7, 10).proportion_ci(method="wilson")
    assert (whole.low, whole.high) == pytest.approx((wilson.low, wilson.high))


@pytest.mark.slow
def test_a_run_measures_at_each_evaluation(tmp_path: Path) -> None:
    model = str(tiny.save(tmp_path / "model"))
    result = runs.train(
        model, tmp_path / "run", rounds=4, epsilon=8.0, delta=1e-3, optimizer__learning_rate=0.1,
        evaluation_prompts=PUBLIC, evaluation__every=2,
        data__max_prompt_tokens=64,
    )  # fmt: skip
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "public_kl" in line] == [2]
    assert lines[1]["public_kl"] != 0.0
    assert 1 <= lines[1]["public_response_tokens"] <= 6
    assert 0 <= lines[1]["public_ended_share"] <= 1
    assert {"public_reward", "public_reward_win_rate", "public_perplexity"} < lines[1].keys()
    kept = (tmp_path / "run/public-samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in kept]
    assert [(s["round"], s["prompt"]) for s in samples] == [(2, prompt) for prompt in PUBLIC[:5]]
    # The result, samples.json and evaluation.json say the same.
    assert result.before.measures["kl"].mean == 0.0
    assert result.after.measures["kl"].mean != 0.0
    assert result.compared["reward"].difference == result.difference
    file = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert file["after"]["reward"]["mean"] == result.after.mean
    rate = file["compared"]["reward"]["win_rate"]["rate"]
    assert rate == result.compared["reward"].win_rate.rate


def estimate(reward: float, kl_per_token: float, perplexity: float) -> PolicyEstimate:
    measured = {"kl_per_token": kl_per_token, "perplexity": perplexity}
    means = {name: RewardEstimate(value, 0.1, 8) for name, value in measured.items()}
    return PolicyEstimate(reward, 0.1, 8, measures=means)


@pytest.mark.parametrize(
    ("norm", "released", "after", "said"),
    [
        (2.0, 1.0, estimate(1.0, 0.1, 9.0), []),
        (1.0, 1.0, estimate(1.0, 0.1, 9.0), ["noise alone"]),
        (2.0, 2.9, estimate(1.0, 0.1, 9.0), ["close to the range"]),
        (2.0, None, estimate(2.8, 0.1, 9.0), ["close to the range"]),
        (2.0, 1.0, estimate(1.0, 1.5, 9.0), ["far from the base"]),
        (2.0, 1.0, estimate(1.0, 0.1, 20.0), ["far from the base"]),
        (2.0, 1.0, None, []),
    ],
)
def test_what_released_and_public_values_show_is_warned_of(norm, released, after, said):
    line = {"released_gradient_norm": norm, "expected_noise_norm": 1.0}
    line |= {"private_reward_noised": released, "private_reward_noise_std": 0.05}
    before = estimate(0.0, 0.0, 8.0)
    found = drift_warnings([line, {"another": "line"}], 3.0, before, after)
    assert len(found) == len(said)
    assert all(words in warning for words, warning in zip(said, found, strict=True))
