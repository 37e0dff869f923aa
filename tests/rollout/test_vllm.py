"""Sampling by vLLM, with a stand-in that has the signatures of the pinned version."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

from dprlhf import DprlhfError, recipe
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.policies.protocol import Sampling
from dprlhf.policies.stopping import StopStrings
from dprlhf.rollout import resolve_batch_size
from dprlhf.rollout import vllm as backend
from helpers import tiny, vllm_stub
from helpers.sampled import (
    EOS,
    SLOTS,
    TEMPERATURE,
    TEXTS,
    USERS,
    answers,
    draw,
    five,
    policy_of,
    prompts_of,
)

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[vllm_stub.Faults]:
    """A ``vllm`` in batch-invariant mode, and a GPU with 60 of 80 GB free."""
    vllm_stub.install(monkeypatch)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setattr(CausalLMPolicy, "device", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 80 * 10**9))
    backend.engine.cache_clear()
    yield vllm_stub.FAULTS
    backend.engine.cache_clear()


def bfloat16_policy(temperature: float = TEMPERATURE, **adapter: Any) -> CausalLMPolicy:
    spec = recipe.Adapter(**{"type": "lora", "rank": 3, **adapter})
    model = tiny.model("llama").bfloat16()
    model.name_or_path = "the/model"
    return make_policy(model, tiny.tokenizer(), spec, temperature=temperature)


def test_vllm_is_asked_for_the_policys_own_distribution(fake: vllm_stub.Faults) -> None:
    policy = bfloat16_policy()
    policy.end_tokens = [EOS, 5]
    draw(policy, five(), backend="vllm", base_policy="reference")
    llm = backend.engine(policy)
    assert llm is fake.engines[-1]
    asked = {
        "model": "the/model", "dtype": "bfloat16", "gpu_memory_utilization": 60 / 80 / 2,
        "enable_lora": True, "max_lora_rank": 8, "enable_prefix_caching": False,
        "generation_config": "vllm", "attention_backend": "TRITON_ATTN", "async_scheduling": False,
    }  # fmt: skip
    assert asked.items() <= llm.arguments.items()
    tuned, base = llm.calls[-2:]
    settings, adapter = tuned.settings, tuned.adapter
    assert base.adapter is None
    assert vars(settings[0]) == {
        "n": 1, "temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "seed": settings[0].seed, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "max_tokens": 6, "min_tokens": 0, "ignore_eos": True,
        "stop_token_ids": [EOS, 5], "detokenize": False, "logprobs": 0,
    }  # fmt: skip
    assert not Path(adapter.lora_path).exists()
    sent = {name: tensor.float() for name, tensor in adapter.weights.items()}
    assert sent.keys() == policy.state().keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in policy.state().items())


def test_vllm_gets_the_settings_that_log_probabilities_follow(fake: vllm_stub.Faults) -> None:
    policy = bfloat16_policy()
    policy.sampling = Sampling(5, 0.9, 0.0)
    draw(policy, five(), backend="vllm")
    settings = vars(backend.engine(policy).calls[-1].settings[0])
    asked = {"top_k": 5, "top_p": 0.9, "min_p": 0.0}
    assert asked.items() <= settings.items()


@pytest.mark.slow
def test_an_adapter_that_moved_comes_under_another_number(fake: vllm_stub.Faults) -> None:
    policy = bfloat16_policy()
    draw(policy, five(), backend="vllm")
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(1)
    draw(policy, five(), backend="vllm")
    old, new = (call.adapter for call in backend.engine(policy).calls[-2:])
    assert old.lora_int_id != new.lora_int_id
    assert old.lora_name != new.lora_name  # vLLM compares requests by it
    assert not all(torch.equal(old.weights[name], new.weights[name]) for name in new.weights)


def test_vllms_answers_come_back_to_their_rows(fake: vllm_stub.Faults) -> None:
    """Each by its own seed, which neither the order nor the presence of others changes."""
    policy = bfloat16_policy()
    whole = draw(policy, five(), backend="vllm", responses=4, base_policy="reference")
    seeds = {
        (tuple(p["prompt_token_ids"]), s.seed)
        for call in backend.engine(policy).calls[-2:]
        for p, s in zip(call.prompts, call.settings, strict=True)
    }
    assert len({seed for _, seed in seeds}) == 20
    truth = answers(whole)
    assert sorted(truth.values()) == sorted(
        vllm_stub.answer(p["prompt_token_ids"], s.seed, call.adapter is None, 6, [EOS])
        for call in backend.engine(policy).calls[-2:]
        for p, s in zip(call.prompts, call.settings, strict=True)
    )
    assert {len(tokens) for tokens in truth.values()} > {6}  # some end early
    fewer = prompts_of(TEXTS[3:0:-1], USERS[3:0:-1], SLOTS[3:0:-1])
    some = answers(draw(policy, fewer, backend="vllm", responses=4, base_policy="reference"))
    assert some == {key: truth[key] for key in some}
    assert len(some) == 12
    assert draw(policy, prompts_of([], [], []), backend="vllm").users == 0


@pytest.mark.parametrize(
    "fault", ["couples_requests", "couples_logprobs", "couples_with_an_adapter", None]
)
def test_vllm_must_not_let_requests_move_each_other(fake, fault):
    """Neither tokens nor log-probabilities, and not with an adapter that has moved alone."""
    policy = bfloat16_policy()
    before = policy.state()
    if fault is None:
        resolve(policy)
    else:
        setattr(fake, fault, True)
        with pytest.raises(DprlhfError, match="tokens or log-probabilities alone"):
            resolve(policy)
    assert all(torch.equal(before[name], now) for name, now in policy.state().items())


def resolve(policy: CausalLMPolicy) -> None:
    spec = recipe.Rollout(backend="vllm", max_new_tokens=12)
    resolve_batch_size(spec, policy, rows=40, max_prompt_tokens=30)


def test_the_check_has_the_lengths_of_the_run(fake: vllm_stub.Faults) -> None:
    policy = bfloat16_policy()
    resolve(policy)
    calls = backend.engine(policy).calls
    assert max(len(call.prompts) for call in calls) == 40
    assert min(len(call.prompts) for call in calls) == 1
    assert max(len(p["prompt_token_ids"]) for call in calls for p in call.prompts) == 30
    assert max(s.max_tokens or 0 for call in calls for s in call.settings) == 12


def test_rows_that_the_engine_cannot_hold_are_refused_at_the_start(fake):
    fake.longest = 41
    with pytest.raises(DprlhfError, match=r"do not fit into the 41.*max_prompt_tokens"):
        resolve(bfloat16_policy())
    fake.longest = 42
    resolve(bfloat16_policy())


def test_a_response_that_stops_without_an_end_costs_its_user_alone(fake: vllm_stub.Faults) -> None:
    policy = bfloat16_policy()
    whole = draw(policy, five(), backend="vllm")
    fake.cuts_short = True
    broken = draw(policy, five(), backend="vllm")
    assert broken.failed is not None
    assert not whole.failed.any()
    assert np.flatnonzero(broken.failed).tolist() == [0]
    assert torch.equal(whole.tokens[1:], broken.tokens[1:])


REFUSALS: dict[str, Any] = {
    "VLLM_BATCH_INVARIANT=1": lambda patch: patch.setenv("VLLM_BATCH_INVARIANT", "0"),
    "unset VLLM_ENABLE_V1_MULTIPROCESSING": lambda patch: patch.setenv(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    ),
    r"pip install -e '\.\[vllm\]'": lambda patch: patch.setitem(sys.modules, "vllm", None),
    "version 0.30.0 has no batch-invariant mode": lambda patch: patch.delattr(
        sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT"
    ),
    "one process with a GPU": lambda patch: patch.setattr(
        CausalLMPolicy, "device", torch.device("cpu")
    ),
    "no such layer": lambda patch: patch.setattr(vllm_stub.FAULTS, "fails", "no such layer"),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_vllm_is_refused_where_it_cannot_keep_users_apart(fake, monkeypatch, message):
    REFUSALS[message](monkeypatch)
    with pytest.raises(DprlhfError, match=message):
        resolve_batch_size(
            recipe.Rollout(backend="vllm"), bfloat16_policy(), rows=9, max_prompt_tokens=9
        )


def test_vllm_is_refused_for_policies_that_it_cannot_sample(fake: vllm_stub.Faults) -> None:
    fields = {"peft_type": "LORA", "use_dora": True, "target_modules": ["v_proj"]}
    dora = bfloat16_policy(type="peft", rank=1, peft=fields)
    no_adapter = CausalLMPolicy(tiny.model("llama").bfloat16(), tiny.tokenizer())
    wide = bfloat16_policy()
    wide.model.peft_config["default"].r = 513
    mixed = bfloat16_policy()
    mixed.sampling = Sampling(top_p=0.9, min_p=0.1)
    stopping = bfloat16_policy()
    stopping.stop = StopStrings(stopping.tokenizer, ["x"])
    for policy, message in (
        (stopping, "rollout.stop"),
        (mixed, "rollout.min_p: vllm applies it before top_p"),
        (dora, "LoRA adapters only"),
        (no_adapter, "LoRA adapters only"),
        (policy_of("llama", torch.float32), "policy.dtype: bfloat16"),
        (bfloat16_policy(temperature=0.001), "rollout.temperature 0.001"),
        (bfloat16_policy(temperature=2.5), "rollout.temperature 2.5"),
        (wide, "policy.adapter.rank 513"),
    ):
        with pytest.raises(DprlhfError, match=message):
            backend.engine(policy)


def test_vllm_loads_the_very_commit_that_transformers_loaded(fake: vllm_stub.Faults) -> None:
    """The branch may have moved since, and gradients are those of the older weights."""
    policy = bfloat16_policy()
    policy.network.config._commit_hash = "5" * 40
    assert backend.engine(policy).arguments["revision"] == "5" * 40


def test_the_stand_in_is_of_the_pinned_version() -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        (pinned,) = tomllib.load(file)["project"]["optional-dependencies"]["vllm"]
    assert str(Requirement(pinned).specifier) == f"=={vllm_stub.VERSION}"


def test_an_argument_that_the_pinned_version_does_not_know_is_refused(fake, monkeypatch):
    """Negative control: a call that another version understands fails here."""
    policy = bfloat16_policy()
    asked = backend.engine(policy).arguments
    with pytest.raises(TypeError, match="swap_space"):
        vllm_stub.LLM(**asked, swap_space=4)
    with pytest.raises(TypeError, match="best_of"):
        vllm_stub.SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="prompt_adapter_request"):
        backend.engine(policy).generate([], [], use_tqdm=False, prompt_adapter_request=None)
