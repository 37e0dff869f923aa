"""A rollout_func of the program: called user by user, and what it returns is checked."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.agents import FunctionSampler, check_apart
from dprlhf.data.users import Prompts
from dprlhf.rewards.private import rows_to_score
from dprlhf.rollout import Responses, sample
from helpers import agents
from helpers.agents import policy_of
from helpers.runs import weights

KEY = bytes(range(32))
CALLS: list[list[Any]] = []


def prompts_of(texts: list[str], users: list[int]) -> Prompts:
    owners = np.array(users)
    slots = np.array([users[:i].count(u) for i, u in enumerate(users)], dtype=np.int64)
    return Prompts([agents.asked(text) for text in texts], owners, slots, {})


def generated(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Sample with the model's own generate, and let the environment say the last word."""
    CALLS.append(prompts)
    tokenizer = trainer.processing_class
    made: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    made["luck"] = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        out = trainer.model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=4, do_sample=True, pad_token_id=0,
        )  # fmt: skip
        own = out[0, len(ids) :].tolist()
        said = tokenizer("well")["input_ids"]
        made["prompt_ids"].append(ids)
        made["completion_ids"].append(own + said)
        made["env_mask"].append([1] * len(own) + [0] * len(said))
        made["logprobs"].append([0.0] * (len(own) + len(said)))
        made["luck"].append(random.random())
    return made


def draw(function: Any, prompts: Prompts, *, private: bool = True, ends: bool = True) -> Responses:
    policy = policy_of()
    if not ends:
        policy.end_tokens = []
    sampler = policy.sampler if isinstance(policy.sampler, FunctionSampler) else None
    if sampler is None or sampler.function is not function:
        sampler = FunctionSampler(function)
    sampler.attach(policy, 40)
    sampler._names = {"luck"}
    spec = recipe.Rollout(responses=2, max_new_tokens=12, batch_size=8)
    return sample(
        policy, prompts, spec, key=KEY, context=("rollout", 1), max_prompt_tokens=40,
        private=private,
    )  # fmt: skip


PROMPTS = prompts_of(["one", "two", "three", "four"], [7, 3, 7, 5])


def test_it_gets_one_users_prompts_each_as_often_as_it_is_answered() -> None:
    CALLS.clear()
    responses = draw(generated, PROMPTS)
    texts = [[p[0]["content"] for p in call] for call in CALLS]
    assert texts == [["two", "two"], ["four", "four"], ["one", "one", "three", "three"]]
    policy = policy_of()
    for row, place in enumerate(responses.prompt.tolist()):
        asked = policy.encode([PROMPTS.prompts[place]], 40)[0]
        assert responses.tokens[row][responses.mask[row].bool()].tolist()[: len(asked)] == asked
    assert responses.user.tolist() == [2, 2, 0, 0, 2, 2, 1, 1]
    own, real = responses.policy_mask, responses.response_mask
    for row in range(8):
        answered = responses.tokens[row, -12:][real[row].bool() & (own[row] == 0)]
        assert policy.tokenizer.decode(answered) == "well"
    assert int(own.sum(1).max()) == 4
    assert rows_to_score(responses).columns["luck"] == responses.extra["luck"]


def test_what_it_returns_for_a_user_is_drawn_from_the_users_own_stream() -> None:
    whole = draw(generated, PROMPTS)
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    some = draw(generated, PROMPTS.take([3, 0, 2]))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    for a, b in [(6, 0), (7, 1), (0, 2), (1, 3), (4, 4), (5, 5)]:
        assert whole.extra["luck"][a] == some.extra["luck"][b]
        for of_whole, of_some in ((whole.tokens, some.tokens), (whole.mask, some.mask)):
            assert of_whole[a, -12:].tolist() == of_some[b, -12:].tolist()
    assert len(set(whole.extra["luck"])) == 8


def failing(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    if any("three" in prompt[0]["content"] for prompt in prompts):
        raise ValueError("I refuse " + prompts[0][0]["content"])
    return generated(prompts, trainer)


def test_a_user_on_whom_it_fails_is_alone_in_that() -> None:
    responses = draw(failing, PROMPTS)
    assert responses.failed is not None
    assert responses.failed.tolist() == [u == 2 for u in responses.user]
    assert int(responses.response_mask.sum(1).min()) == 1
    endless = draw(failing, PROMPTS, ends=False)  # a model that has no end token
    assert endless.failed is not None
    assert endless.failed.tolist() == responses.failed.tolist()
    with pytest.raises(DprlhfError, match="public prompt, ValueError: I refuse one"):
        draw(failing, PROMPTS, private=False)
    nested: Any = "three"
    for _ in range(sys.getrecursionlimit()):
        nested = [nested]
    deep = [*PROMPTS.prompts[:2], agents.asked(nested), PROMPTS.prompts[3]]  # no copy of it
    copied = draw(generated, dataclasses.replace(PROMPTS, prompts=deep))
    assert copied.failed is not None
    assert copied.failed.tolist() == responses.failed.tolist()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda made: made.pop("logprobs"), "has no 'logprobs'"),
        (lambda made: made["prompt_ids"].pop(), "prompts were given"),
        (lambda made: made["completion_ids"][0].append(10**6), "are no tokens"),
        (lambda made: made["env_mask"][0].pop(), "its mask is shorter"),
    ],
)
def test_a_result_that_cannot_be_used_is_refused(change: Any, why: str) -> None:
    def broken(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = generated(prompts, trainer)
        change(made)
        return made

    with pytest.raises(DprlhfError, match=why):
        draw(broken, PROMPTS, private=False)
    responses = draw(broken, PROMPTS)
    assert responses.failed is not None
    assert responses.failed.all()


@pytest.mark.slow
def test_one_that_keeps_something_is_refused() -> None:
    seen: list[Any] = []

    def counting(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.extend(prompts)
        made = generated(prompts, trainer)
        made["completion_ids"] = [[len(seen) % 200 + 1] for _ in prompts]
        made["env_mask"] = [[1] for _ in prompts]
        return made

    policy, public = policy_of(), prompts_of(["one", "two", "three", "four"], [0, 1, 2, 3])
    spec = recipe.Rollout(responses=2, max_new_tokens=12)
    for function, refused in [(generated, False), (counting, True)]:
        FunctionSampler(function).attach(policy, 40)
        if not refused:
            check_apart(policy, spec, public, 40)
            continue
        with pytest.raises(DprlhfError, match="keeps something from call to call"):
            check_apart(policy, spec, public, 40)


def lucky(completions: list[Any], luck: list[float], **columns: Any) -> list[float]:
    return list(luck)


@pytest.mark.slow
def test_a_run_with_a_rollout_func(tmp_path: Path) -> None:
    result = dprlhf.train(
        model=agents.save(tmp_path / "model"),
        prompts=[agents.asked(f"user {i}") for i in range(12)],
        reward=lucky,
        rollout_func=generated,
        epsilon=8.0,
        rounds=2,
        learning_rate=0.05,
        policy__adapter={"type": "lora", "rank": 2, "target_modules": ["c_attn"]},
        data__max_prompt_tokens=40,
        rollout__max_new_tokens=12,
        rollout__responses=2,
        update__batch_size=8,
        update__name="grpo",
        quiet=True,
        output_dir=tmp_path / "run",
    )
    assert bool(torch.cat([w.flatten() for w in weights(result.folder.path).values()]).any())
