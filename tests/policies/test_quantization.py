"""A frozen base in 4 or 8 bit: what is taken, and that rows stay apart."""

import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dprlhf import recipe
from dprlhf.gradients.per_user import PerUserGradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import load_policy
from dprlhf.policies.refusals import mixing_layers
from helpers import tiny
from helpers.policies import off_start

pytest.importorskip("bitsandbytes")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def policy(model: str, quantization: Any) -> CausalLMPolicy:
    adapter = {"type": "lora", "rank": 2, "target_modules": ["q_proj", "v_proj"]}
    settings = {"model_name_or_path": model, "quantization": quantization, "adapter": adapter}
    return off_start(load_policy(recipe.Policy.model_validate(settings)), 0.05)


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, 257, (count, 12), generator=torch.Generator().manual_seed(2))
    return tokens, torch.ones_like(tokens)


@pytest.mark.parametrize("name", ["nf4", "fp4", "int8"])
def test_each_users_gradient_is_autograds_of_its_rows(model: str, name: str) -> None:
    made = policy(model, name)
    tokens, mask = rows(4)
    with torch.no_grad():  # in evaluation mode, as sampling is
        made.response_logprobs(tokens, mask, 5)
    found = PerUserGradients(made.model, made.parameters, whole=True)
    found.run(lambda: made.response_logprobs(tokens, mask, 5).sum(), users=4, rows=4)
    of_users = found.gradients()
    for user in range(4):
        made.model.zero_grad()
        one = slice(user, user + 1)
        made.response_logprobs(tokens[one], mask[one], 5).sum().backward()
        grads = [p.grad for p in made.parameters.values()]
        assert all(grad is not None and grad.abs().max() > 0 for grad in grads)
        alone = torch.cat([grad.flatten() for grad in grads if grad is not None])
        assert torch.allclose(of_users[user], alone, rtol=1e-3, atol=1e-4)


def outlier_model(threshold: float) -> torch.nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(0)
    layer = Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=threshold)
    layer.load_state_dict({"weight": torch.randn(64, 64)})
    return torch.nn.Sequential(layer.to("cpu")).eval()


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_outlier_columns_couple_the_rows_and_are_refused(threshold: float) -> None:
    layer = outlier_model(threshold)
    x = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(3))
    other = x.clone()
    other[3] *= 20  # another user's row, with outliers
    with torch.no_grad():
        coupled = not torch.equal(layer(x)[:3], layer(other)[:3])
    assert coupled == (threshold > 0)
    assert any(mixing_layers(layer)) == (threshold > 0)
