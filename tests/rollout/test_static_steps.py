"""Decoding over fixed tensors samples what ordinary decoding does, also by replayed steps."""

import functools
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from dprlhf import recipe
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.policies.protocol import Sampling
from dprlhf.rollout import sampling, static_steps
from dprlhf.rollout.decoding import decode
from dprlhf.rollout.static_steps import StaticSteps
from helpers import tiny
from helpers.graph_recorder import Cuda
from helpers.sampled import TEMPERATURE, draw, five, model_of, policy_of

WIDTH, SIZE, NEW = 12, 4, 6
PROMPTS = [[5, 6, 7], list(range(1, 13)), [9]]


def uniforms(responses: int, seed: int = 3, prompts: int = SIZE) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(prompts, responses, NEW, generator=random, dtype=torch.float64)


def decoded(policy, draws, static=None, **changes):
    seen: list[torch.Tensor] = []
    settings = {"prompts": [*PROMPTS, None], "width": WIDTH, "static": static, **changes}
    found = decode(policy, uniforms=draws, watch=lambda x: seen.append(x.clone()), **settings)
    return found, seen


def static_of(policy: CausalLMPolicy, responses: int, cuda: Any = None) -> StaticSteps:
    return StaticSteps(
        policy, size=SIZE, width=WIDTH, num_generations=responses, max_new_tokens=NEW, cuda=cuda
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("responses", [1, 2, 8])  # 2 go behind one copy of their prompt, and 4 of 8
@pytest.mark.parametrize("graphs", [False, True])
def test_it_computes_what_ordinary_decoding_computes(kind, responses, graphs):
    policy = policy_of(kind)
    static = static_of(policy, responses, Cuda() if graphs else None)
    for seed in range(3):  # the second micro-batch finds what the first has left
        draws = uniforms(responses, seed)
        found, logits = decoded(policy, draws, static)
        expected, ordinary = decoded(policy, draws)
        assert found == expected
        assert len(logits) == len(ordinary) > 2
        for ours, theirs in zip(logits, ordinary, strict=True):
            torch.testing.assert_close(
                ours.log_softmax(1), theirs.log_softmax(1), rtol=0, atol=1e-11
            )


def test_a_step_is_captured_once_and_then_repeated_on_the_same_memory() -> None:
    policy, cuda, calls = policy_of("llama"), Cuda(), []
    hook = policy.model.register_forward_hook(lambda *_: calls.append(None))
    static = static_of(policy, 2, cuda)
    first, logits = decoded(policy, uniforms(2), static)
    steps = len(logits) - 1
    assert cuda.events == [
        "side waits for main", "on side", "off side", "main waits for side", "capture",
        *["replay"] * steps,
    ]  # fmt: skip
    assert len(calls) == 3  # the prompts, the step that sets libraries up, and the capture
    memory = {name: x.data_ptr() for name, x in vars(static).items() if isinstance(x, torch.Tensor)}
    assert {"_tokens", "_positions", "_bias", "_now", "_logits"} < set(memory)
    rooms = [x.data_ptr() for layer in static._cache.layers for x in (layer.keys, layer.values)]
    again, logits = decoded(policy, uniforms(2), static)
    hook.remove()
    assert again == first
    assert cuda.events[5:] == ["replay"] * (steps + len(logits) - 1)
    assert len(calls) == 4  # the prompts of the second micro-batch
    assert all(vars(static)[name].data_ptr() == place for name, place in memory.items())
    assert rooms == [
        x.data_ptr() for layer in static._cache.layers for x in (layer.keys, layer.values)
    ]


@pytest.mark.parametrize("graphs", [False, True])
def test_what_one_micro_batch_leaves_behind_reaches_no_other(graphs: bool) -> None:
    """Neither the keys of its tokens, nor a NaN among them, which no mask takes back."""
    policy = policy_of("llama")
    alone, logits = decoded(policy, uniforms(2), static_of(policy, 2, Cuda() if graphs else None))
    static = static_of(policy, 2, Cuda() if graphs else None)
    decoded(policy, uniforms(2, seed=8), static, prompts=[[70, 71], [72], [73, 74, 75], None])
    for layer in static._cache.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    found, after = decoded(policy, uniforms(2), static)
    assert found == alone
    assert all(torch.equal(a, b) for a, b in zip(after, logits, strict=True))


def test_rows_do_not_move_each_other() -> None:
    """Bit for bit in float32, at the same shapes: with other prompts beside it, or none."""
    policy = make_policy(tiny.model("llama"), tiny.tokenizer(), recipe.Adapter(type="lora", rank=2))
    draws = uniforms(4)
    found, logits = decoded(policy, draws, static_of(policy, 4))
    other = [PROMPTS[0], [33, 34, 35, 36], [2] * 9, [5]]
    changed = torch.cat([draws[:1], uniforms(4, seed=5)[1:]])
    beside, others = decoded(policy, changed, static_of(policy, 4), prompts=other)
    single, alone = decoded(policy, draws, static_of(policy, 4), prompts=[PROMPTS[0], *[None] * 3])
    assert found[:4] == beside[:4] == single[:4]
    for three in zip(logits, others, alone, strict=False):
        own = [x.view(SIZE, -1)[0] for x in three]
        assert torch.equal(own[0], own[1])
        assert torch.equal(own[0], own[2])


def test_what_is_cut_is_cut_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("gpt2")
    with policy.sampled_with(Sampling(9, 0.9, 0.01)):
        expected = draw(policy, five(), responses=4)
        monkeypatch.setattr(
            static_steps, "StaticSteps", functools.partial(StaticSteps, cuda=Cuda())
        )
        monkeypatch.setattr(sampling, "replays_graphs", lambda *_: True)
        found = draw(policy, five(), responses=4)
    assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_gpus_graph_computes_what_its_ordinary_steps_do(kind: tiny.Kind) -> None:
    adapter = recipe.Adapter(type="lora", rank=2)
    policy = make_policy(model_of(kind), tiny.tokenizer(), adapter, temperature=TEMPERATURE)
    policy.model.to("cuda")
    static = static_of(policy, 4)
    for seed in range(3):
        found, logits = decoded(policy, uniforms(4, seed), static)
        expected, ordinary = decoded(policy, uniforms(4, seed))
        assert found == expected
        for ours, theirs in zip(logits, ordinary, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_models_that_look_back_a_fixed_distance_are_left_out() -> None:
    config = MistralConfig(**{**tiny.SMALL, "sliding_window": 8})
    policy = make_policy(
        MistralForCausalLM(config), tiny.tokenizer(), recipe.Adapter(type="lora", rank=1)
    )
    assert not static_steps.steps_are_alike(policy)
    assert static_steps.steps_are_alike(policy_of("llama"))


def test_graphs_are_for_a_gpu_and_for_single_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, spec = policy_of("gpt2"), recipe.Rollout()
    assert not sampling.replays_graphs(policy, spec)
    monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
    assert sampling.replays_graphs(policy, spec)
    for changes in ({"backend": "vllm"}, {"agent": recipe.Agent(tools=["f"])}):
        assert not sampling.replays_graphs(policy, spec.model_copy(update=changes))
