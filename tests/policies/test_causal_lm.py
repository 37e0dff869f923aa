"""The policy without an adapter, and with checkpoints in its layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from dprlhf import recipe
from dprlhf.data.public import in_memory_prompts
from dprlhf.errors import DprlhfError
from dprlhf.gradients.per_user import PerUserGradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import load_policy, make_policy
from dprlhf.rollout import sample
from helpers import tiny

KINDS: list[tiny.Kind] = ["gpt2", "llama"]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, 257, (4, 12), generator=torch.Generator().manual_seed(2))
    return tokens, torch.ones_like(tokens)


def made(kind: tiny.Kind, **adapter: Any) -> CausalLMPolicy:
    return make_policy(tiny.model(kind), tiny.tokenizer(), recipe.Adapter.model_validate(adapter))


def gradients(policy: CausalLMPolicy) -> torch.Tensor:
    found = PerUserGradients(policy.model, policy.parameters, whole=True)
    found.run(lambda: policy.response_logprobs(*rows(), 5).sum(), users=2, rows=4)
    return found.gradients()


@pytest.mark.parametrize(("part", "checkpoints"), [("", True), ("transformer.h.1", False)])
def test_a_program_that_turns_dropout_on_finds_it_off(part: str, checkpoints: bool) -> None:
    """With dropout every user's gradient would change with who else is in the batch."""
    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    assert config.resid_pdrop == 0.1
    adapter = recipe.Adapter(target_modules="all-linear")
    policy = make_policy(GPT2LMHeadModel(config), tiny.tokenizer(), adapter)
    if checkpoints:
        policy.checkpoint_layers()
    with torch.no_grad():
        policy.parameters[next(n for n in policy.parameters if "lora_B" in n)].fill_(0.1)

    def everything() -> list[torch.Tensor]:
        spec = recipe.Rollout(base_policy="on-policy", max_new_tokens=4, batch_size=8)
        prompts = in_memory_prompts(["one", "other"])
        sampled = sample(
            policy, prompts, spec, key=bytes(32), context=("test",), max_prompt_tokens=16
        )
        with torch.no_grad():
            values = policy.response_logprobs(*rows(), 5)
        return [values, sampled.tokens, gradients(policy)]

    expected, changed = (
        everything(),
        policy.model.get_submodule(part and f"base_model.model.{part}"),
    )
    with policy.without_dropout():
        for _ in range(2):
            changed.train()
            assert all(map(torch.equal, everything(), expected))
        assert not any(module.training for module in policy.model.modules())
    changed.train()  # the program's own training after the run has dropout
    assert not torch.equal(gradients(policy), expected[-1])
    assert any(module.training for module in changed.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_of_a_whole_policy_is_where_it_started(kind: tiny.Kind) -> None:
    policy, start = made(kind, type="full"), made(kind, type="full")
    assert policy.dimension == sum(p.numel() for p in policy.model.parameters())
    tokens, mask = rows()
    with torch.no_grad():
        expected = start.response_logprobs(tokens, mask, 5)
        for parameter in policy.parameters.values():
            parameter.add_(0.01)
        moved = policy.response_logprobs(tokens, mask, 5)
        with policy.base():
            assert policy.is_base
            assert torch.equal(policy.response_logprobs(tokens, mask, 5), expected)
            with policy.base():
                assert torch.equal(policy.response_logprobs(tokens, mask, 5), expected)
            assert torch.equal(policy.response_logprobs(tokens, mask, 5), expected)
        assert not policy.is_base
        assert torch.equal(policy.response_logprobs(tokens, mask, 5), moved)
        assert not torch.equal(moved, expected)


def test_a_whole_policy_keeps_its_state_and_is_trained_in_float32(tmp_path: Path) -> None:
    model = tiny.model("llama").to(torch.bfloat16).requires_grad_(False)
    policy = make_policy(model, tiny.tokenizer(), recipe.Adapter(type="full"))
    assert {p.dtype for p in policy.parameters.values()} == {torch.float32}
    state = policy.state()
    with torch.no_grad():
        next(iter(policy.parameters.values())).zero_()
    policy.load_state(state)
    assert all(torch.equal(p, state[n]) for n, p in policy.parameters.items())
    policy.save(tmp_path)
    again = load_policy(recipe.Policy(model_name_or_path=str(tmp_path)))
    assert torch.equal(again.network.get_input_embeddings().weight,
                       policy.network.get_input_embeddings().weight)  # fmt: skip


@pytest.mark.parametrize("lacking", ["lm_head.weight", "transformer.h.1.mlp.c_fc.bias"])
def test_a_checkpoint_without_all_weights_is_refused(lacking: str, tmp_path: Path) -> None:
    """Such weights are random at each load, and the tuned adapter is of no use to another model."""
    tiny.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=weights)
    spec = recipe.Policy(model_name_or_path=str(tmp_path))
    assert load_policy(spec).dimension > 0
    del weights[lacking]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DprlhfError, match=f"no weights for {lacking}, which would be random"):
        load_policy(spec)


def test_a_prompt_with_a_token_beyond_the_model_is_refused_and_not_quoted() -> None:
    """Gemma 3's tokenizer has one for an image; looked up, it would end the run of everybody."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    policy = make_policy(tiny.model(), tokenizer, recipe.Adapter())
    for prompt in ("a secret <image>", [{"role": "user", "content": "a secret <image>"}]):
        with pytest.raises(DprlhfError, match="beyond the 257") as caught:
            policy.encode(["fine", prompt], 16)
        assert "secret" not in str(caught.value)
    with pytest.raises(DprlhfError, match="beyond the 257"):
        policy.render([{"role": "user", "content": "<image>"}])
    with pytest.raises(DprlhfError, match="tokens beyond"):  # a reward sees the text before the cut
        policy.encode(["<image> is cut off"], 3)


@pytest.mark.parametrize("special", ["beyond", "none"])
def test_an_empty_prompt_has_a_token_that_the_model_knows(special: str) -> None:
    """A user's empty prompt ended the run of everybody, in the round that was its secret."""
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = tokenizer.bos_token = None
    if special == "beyond":
        tokenizer.add_special_tokens({"eos_token": "[END]", "bos_token": "[BEGIN]"})
        assert tokenizer.bos_token_id >= 257
    policy = make_policy(tiny.model("gpt2"), tokenizer, recipe.Adapter())
    assert policy.encode(["", "a"], 8)[0] == [tokenizer.pad_token_id]
    spec = recipe.Rollout(max_new_tokens=4)
    prompts = in_memory_prompts(["", "a"])
    found = sample(policy, prompts, spec, key=bytes(32), context=("x",), max_prompt_tokens=8)
    assert len(found.texts) == 2 * spec.responses


@pytest.mark.parametrize(
    ("configured", "ends"), [(None, []), (0, [0]), ([0, 256, 300, -1], [0, 256])]
)
def test_no_response_ends_at_a_token_without_an_embedding(configured: Any, ends: list[int]) -> None:
    model, tokenizer = tiny.model("gpt2"), tiny.tokenizer()
    tokenizer.eos_token = None
    tokenizer.add_special_tokens({"eos_token": "[END]"})
    model.generation_config.eos_token_id = configured
    assert make_policy(model, tokenizer, recipe.Adapter()).end_tokens == ends
