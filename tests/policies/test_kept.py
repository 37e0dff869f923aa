"""What sampling keeps for the gradient pass: the same numbers, for less work."""

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from dprlhf import recipe
from dprlhf.boundary import Private, open_private
from dprlhf.data.public import in_memory_prompts
from dprlhf.data.users import Prompts
from dprlhf.gradients.clipping import Weighted, clipped_sum
from dprlhf.policies import kept, shared_prompt
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rollout import Responses, sample
from dprlhf.rollout.logprobs import token_logprobs
from dprlhf.training.linear_reward import mean_states
from dprlhf.training.made_up_rounds import Shapes, gradients_of
from helpers import tiny
from helpers.marks import slow
from helpers.policies import exact_norms

LINEAR = (nn.Linear, Conv1D)
TEXTS = ["a story of two", "no", "the film", "ab", "x", "a longer text, cut at its front", "b"]
LENGTH, K = 4, 4


def policy_of(model_type, layers=None, spec=None):
    model = tiny.of_type(model_type, num_hidden_layers=3, n_layer=3)
    layer = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    linear = {n.split(".")[-1] for n, m in layer.named_modules() if isinstance(m, LINEAR)}
    plain = {"type": "lora", "rank": 1, "target_modules": sorted(linear), "init": "random"}
    given = spec or (plain if layers is None else {**plain, "layers": layers})
    adapter = recipe.Adapter.model_validate(given)
    policy = make_policy(model, tiny.tokenizer(), adapter, temperature=0.7)
    exact_norms(policy.model.double())
    for weight in policy.parameters.values():
        torch.nn.init.normal_(weight, std=0.3)
    policy.end_tokens = list(range(0, 257, 4))  # so that some responses end early
    return policy


def sampled(policy, texts=TEXTS, *, size=8, keep="outputs", length=LENGTH, absent=None):
    prompts = in_memory_prompts(texts)
    users = np.array([0, 0, *range(1, len(texts) - 1)])  # the first user has two prompts
    slots = np.array([0, 1, *[0] * (len(texts) - 2)])
    rollout = {"responses": K, "max_new_tokens": length, "temperature": 0.7, "batch_size": size}
    asked = Prompts(prompts.prompts, users, slots, {})
    if absent is not None:
        asked = replace(asked, round_users=np.unique(users), prompts_a_user=2)
        asked = asked.take(np.flatnonzero(users != absent))
    return sample(
        policy, asked, recipe.Rollout.model_validate(rollout), key=bytes(32), context=("test", 1),
        max_prompt_tokens=20, keep=keep,
    )  # fmt: skip


def without(rows: Responses) -> Responses:
    return Responses(**{**vars(rows), "kept": None})


def sums(policy: CausalLMPolicy, rows: Responses, size: int = 12) -> tuple[torch.Tensor, Any]:
    owners = zip(rows.user.tolist(), rows.prompts.slots[rows.prompt].tolist(), strict=True)
    seeds = [(3, *owner, n % K) for n, owner in enumerate(owners)]
    weights = [np.random.default_rng(s).standard_normal(rows.max_new_tokens) for s in seeds]
    found = clipped_sum(
        policy, Private(Weighted(rows, np.array(weights), np.zeros((rows.users, 0)), 0.0)),
        clip_norm=0.2, batch_size=size, reduce=lambda total: total,
    )  # fmt: skip
    return found.bounded.total, open_private(found.norms)


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        *((name, None) for name in sorted(shared_prompt._MODELS)),
        *(slow(name, [1, 2]) for name in ("gemma", "gpt2", "llama", "phi3")),
        *(slow(name, [2]) for name in ("gpt2", "olmo2")),
    ],
)
def test_the_clipped_sum_of_what_was_kept_is_that_of_a_second_pass(model_type, layers):
    policy = policy_of(model_type, layers)
    rows = sampled(policy)
    assert rows.kept.fits(policy)
    assert len(set(rows.response_mask.sum(1).tolist())) > 1  # some end early
    total, norms = sums(policy, rows)
    again, norms_again = sums(policy, without(rows))
    exact = model_type in ("gpt2", "llama")
    close = {"rtol": 1e-10, "atol": 1e-12} if exact else {"rtol": 1e-4, "atol": 1e-6}
    assert norms.min() > 0.1
    torch.testing.assert_close(total, again, **close)
    np.testing.assert_allclose(norms, norms_again, rtol=close["rtol"])


@pytest.mark.parametrize("what", ["logits", "input"])
@pytest.mark.parametrize("layers", [None, [1, 2]])
def test_less_may_be_kept(layers: list[int] | None, what: kept.Keep) -> None:
    policy = policy_of("llama", layers)
    rows = sampled(policy, keep=what)
    expected = ["head"] * (what == "logits") + ["input"] * (layers is not None)
    assert all(sorted(batch) == expected for batch in rows.kept.batches)
    again = without(rows)
    torch.testing.assert_close(
        sums(policy, rows)[0], sums(policy, again)[0], rtol=1e-10, atol=1e-12
    )
    np.testing.assert_allclose(
        token_logprobs(policy, rows, 8), token_logprobs(policy, again, 8), rtol=1e-10
    )


@pytest.mark.parametrize("what", ["outputs", "input", None])
@pytest.mark.parametrize(
    ("model_type", "layers"), [("llama", None), ("llama", [1, 2]), ("gpt2", [2])]
)
def test_mean_states_are_those_of_the_base_model_over_each_row_alone(model_type, layers, what):
    """Two thirds up three layers, whatever was kept of rows that the tuned policy sampled."""
    policy = policy_of(model_type, layers)
    rows = sampled(policy, keep=what)
    states: list[torch.Tensor] = []
    hook = policy.layers[2].register_forward_pre_hook(lambda _, given: states.append(given[0]))
    for ids, mask, own in zip(rows.tokens, rows.mask, rows.response_mask, strict=True):
        with torch.no_grad(), policy.base():
            policy.model(input_ids=ids[mask.bool()][None])
        last = int(own.sum())
        states[-1] = states[-1][0, -last - 1 : -1].mean(0)
    hook.remove()
    torch.testing.assert_close(mean_states(policy, rows, 8), torch.stack(states), rtol=1e-9, atol=0)


@pytest.mark.parametrize("layers", [None, [1, 2]])
def test_what_is_kept_fits_into_an_eighth_of_the_memory(
    layers: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of("llama", layers)
    kinds: list[kept.Keep] = ["outputs", "logits", "input"]

    def most(memory: float, most: kept.Keep = "outputs") -> kept.Keep | None:
        monkeypatch.setattr(kept, "memory_bytes", lambda device: memory)
        sizes = {"rows": len(TEXTS) * K, "prompt": 20, "response": LENGTH, "together": K}
        return kept.room_for(policy, **sizes, most=most)

    assert [most(1e12, kind) for kind in kinds] == [*kinds[:2], kinds[2] if layers else None]
    for kind in kinds[: 3 if layers else 2]:
        batches = sampled(policy, keep=kind, size=len(TEXTS) * K).kept.batches
        size = sum(x.numel() * x.element_size() for batch in batches for x in batch.values())
        assert most(8 * size - 1) != kind
        assert most(8 * size * (1 + LENGTH) / LENGTH) == kind
    assert most(0) is None


@pytest.mark.slow
def test_micro_batches_of_other_sizes_and_rows_of_other_places_take_their_own() -> None:
    policy = policy_of("llama", [1, 2])
    expected = sums(policy, without(sampled(policy, keep=None)))[0]
    for sampled_at_once in (2, 12, 64):
        rows = sampled(policy, size=sampled_at_once)
        for size in (2, 12, 40):
            torch.testing.assert_close(
                sums(policy, rows, size)[0], expected, rtol=1e-10, atol=1e-12
            )
    mixed = np.random.default_rng(0).permutation(len(rows.user))
    taken = Responses(**{**vars(rows.take(mixed)), "num_generations": 1})
    torch.testing.assert_close(
        sums(policy, taken)[0], sums(policy, without(taken))[0], rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("longest", [4, 1000], ids=["in steps alone", "always"])
def test_a_layer_that_is_called_twice_is_computed_again(longest: int) -> None:
    policy = policy_of("llama", [1, 2])
    mlp = policy.network.model.layers[2].mlp

    def again(module: Any, x: Any, y: Any) -> None:
        if x[0].shape[1] <= longest:
            module.gate_proj(x[0])

    hook = mlp.register_forward_hook(again)
    rows = sampled(policy)
    hook.remove()
    names = {name for batch in rows.kept.batches for name in batch}
    assert any("layers.2.mlp.up_proj" in name for name in names)
    assert not any("layers.2.mlp.gate_proj" in name for name in names)
    torch.testing.assert_close(
        sums(policy, rows)[0], sums(policy, without(rows))[0], rtol=1e-10, atol=1e-12
    )


def test_a_policy_that_moved_takes_the_input_of_its_lowest_trained_layer_alone() -> None:
    policy = policy_of("llama", [1, 2])
    rows = sampled(policy)
    with torch.no_grad():
        for weight in policy.parameters.values():
            weight.mul_(-1.5)
    assert not rows.kept.fits(policy)
    torch.testing.assert_close(
        sums(policy, rows)[0], sums(policy, without(rows))[0], rtol=1e-10, atol=1e-12
    )
    with policy.base():
        assert not rows.kept.fits(policy)
        np.testing.assert_allclose(
            token_logprobs(policy, rows, 8), token_logprobs(policy, without(rows), 8), rtol=1e-10
        )


@pytest.mark.parametrize("base", [False, True])
def test_log_probabilities_come_from_the_logits_that_were_sampled_from(base: bool) -> None:
    policy = policy_of("llama", [1, 2])
    with policy.base() if base else contextlib.nullcontext():
        rows = sampled(policy, keep="logits")
        calls: list[int] = []
        policy.network.register_forward_hook(lambda *_: calls.append(1))
        found = token_logprobs(policy, rows, 8)
        assert not calls
        np.testing.assert_allclose(found, token_logprobs(policy, without(rows), 8), rtol=1e-10)
    if not base:
        with policy.base():
            of_base = token_logprobs(policy, rows, 8)
            assert np.abs(of_base - found).max() > 0.1
            expected = token_logprobs(policy, without(rows), 8)
            np.testing.assert_allclose(of_base, expected, rtol=1e-10)


@pytest.mark.parametrize("kind", ["lora", "ffa-lora"])
def test_while_an_adapter_adds_nothing_the_base_policy_takes_all_that_was_kept(kind: str) -> None:
    policy = policy_of("llama", spec={"type": kind, "rank": 2, "target_modules": ["v_proj"]})
    last = [p for name, p in policy.parameters.items() if ".lora_B." in name]
    with torch.no_grad():
        for weight in last:
            weight.zero_()
    rows = sampled(policy)
    calls: list[int] = []
    policy.network.register_forward_hook(lambda *_: calls.append(1))
    with policy.base():
        found = token_logprobs(policy, rows, 8)
        assert not calls
        np.testing.assert_allclose(found, token_logprobs(policy, without(rows), 8), rtol=1e-10)
        with torch.no_grad():
            last[0].fill_(0.1)  # it moved after sampling, which changes nothing of the base policy
        np.testing.assert_array_equal(token_logprobs(policy, rows, 8), found)
    moved = sampled(policy)
    with policy.base():
        assert not moved.kept.fits(policy)


def test_an_adapter_that_rounds_differently_is_not_taken_for_the_base_policy() -> None:
    fields = {"peft_type": "LORA", "r": 2, "target_modules": ["v_proj"], "use_dora": True}
    spec = {"type": "peft", "peft": fields}
    policy = policy_of("llama", spec=spec)
    with torch.no_grad():
        for name, weight in policy.parameters.items():
            if ".lora_B." in name:
                weight.zero_()
    rows = sampled(policy)
    with policy.base():
        assert not rows.kept.fits(policy)


@pytest.mark.parametrize("keep", ["outputs", "logits"])
def test_logits_that_a_model_scales_are_scaled_after_the_head(keep: str) -> None:
    policy = policy_of("granite", [1, 2])
    policy.network.config.logits_scaling = 3.0
    rows = sampled(policy, keep=keep)
    assert rows.kept is not None
    np.testing.assert_allclose(
        token_logprobs(policy, rows, 8), token_logprobs(policy, without(rows), 8), rtol=1e-10
    )


def test_other_users_move_no_bit_of_a_users_gradient() -> None:
    policy = policy_of("llama", [1, 2])
    policy.model.float()

    def norms(absent: int) -> Any:
        rows = sampled(policy, size=16, absent=absent)
        assert rows.kept is not None
        return sums(policy, rows, 8)[1]

    everyone = norms(99)
    for absent in range(len(everyone)):
        np.testing.assert_array_equal(norms(absent), np.delete(everyone, absent))


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("columns", [4, 8])  # as many as responses to a prompt, and more
def test_the_check_at_start_takes_what_is_kept_at_its_own_shapes(columns: int, length: int) -> None:
    policy = policy_of("llama", [1, 2])
    assert policy.shared_rows(K, columns, length) == K
    update = recipe.GRPO(batch_size=2 * K)
    shapes = Shapes(columns, length, K, K, 1, update)
    plain = gradients_of(policy, shapes, range(2))
    found = gradients_of(policy, Shapes(**{**vars(shapes), "keep": "outputs"}), range(2))
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


ADAPTERS: list[dict[str, Any]] = [
    {"peft_type": "LORA", "use_dora": True},
    {"type": "ffa-lora"},
    {"peft_type": "VERA"},
    {"peft_type": "OFT", "oft_block_size": 8},
    {"peft_type": "LORA", "lora_bias": True},
]


@pytest.mark.parametrize(
    ("model_type", "adapter"),
    [
        *itertools.product(["llama"], [*ADAPTERS, {"peft_type": "GRALORA"}]),
        *(slow("gpt2", adapter) for adapter in ADAPTERS if adapter.get("peft_type") != "OFT"),
    ],
    ids=str,
)
def test_every_adapter_has_the_gradients_of_a_second_pass(model_type, adapter):
    targets = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}[model_type]
    spec = {"rank": 1, "target_modules": targets, "layers": [1, 2], **adapter}
    if "peft_type" in adapter:
        fields = {"target_modules": targets, "layers_to_transform": [1, 2], **adapter}
        spec = {"type": "peft", "peft": fields}
    policy = policy_of(model_type, spec=spec)
    rows = sampled(policy)
    assert rows.kept.parts.skipped
    total, norms = sums(policy, rows)
    assert norms.min() > 0.01
    torch.testing.assert_close(total, sums(policy, without(rows))[0], rtol=1e-9, atol=1e-12)


def test_nothing_is_kept_of_a_model_that_a_program_changed() -> None:
    policy = policy_of("llama", [1, 2])
    layer = policy.network.model.layers[1].mlp.gate_proj.get_base_layer()
    doubled = layer.forward
    layer.forward = lambda x: 2 * doubled(x)
    assert kept.keep(policy, "outputs") is None

    class Scaled(type(policy.network)):  # type: ignore[misc]
        pass

    policy = policy_of("llama", [1, 2])
    policy.network.__class__ = Scaled
    assert kept.keep(policy, "outputs") is None


def test_nothing_is_left_in_the_model() -> None:
    policy = policy_of("llama", [1, 2])
    sums(policy, sampled(policy))
    assert not any("forward" in vars(m) for m in policy.network.modules())
    assert not any(m._forward_pre_hooks for m in policy.network.model.layers)
