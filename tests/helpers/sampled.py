"""Responses of tiny policies to a few prompts, for the tests of sampling."""

import functools
from typing import Any

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.data.users import Prompt, Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rollout import Responses, sample
from helpers import tiny
from helpers.policies import off_start

KEY = bytes(range(32))
EOS = 0
TEMPERATURE = 0.7


def model_of(kind: tiny.Kind) -> Any:
    """A tiny model whose next-token distribution is far from uniform."""
    model = tiny.model(kind)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(15)
    return model.double()


@functools.cache
def policy_of(kind: tiny.Kind = "gpt2", dtype: torch.dtype = torch.float64) -> CausalLMPolicy:
    targets = ["c_attn", "c_fc"] if kind == "gpt2" else ["q_proj", "v_proj", "up_proj"]
    spec = recipe.Adapter(type="lora", rank=2, alpha=8.0, target_modules=targets)
    policy = make_policy(model_of(kind), tiny.tokenizer(), spec, temperature=TEMPERATURE)
    off_start(policy, 1.0).model.to(dtype)
    return policy


def prompts_of(
    texts: list[Prompt], users: list[int] | None = None, slots: list[int] | None = None
) -> Prompts:
    return Prompts(
        texts, np.arange(len(texts)) if users is None else np.array(users),
        np.zeros(len(texts), dtype=np.int64) if slots is None else np.array(slots), {},
    )  # fmt: skip


def draw(policy: CausalLMPolicy, prompts: Prompts, **changes: Any) -> Responses:
    settings: dict[str, Any] = {
        "responses": 2, "max_new_tokens": 6, "temperature": TEMPERATURE, "batch_size": 16,
    }  # fmt: skip
    key, context = changes.pop("key", KEY), changes.pop("context", ("rollout", 1))
    limit = changes.pop("max_prompt_tokens", 16)
    spec = recipe.Rollout.model_validate(settings | changes)
    return sample(policy, prompts, spec, key=key, context=context, max_prompt_tokens=limit)


def answers(responses: Responses) -> dict[tuple[int, int, int], list[int]]:
    """The response tokens by (user of the data set, slot, number of the response)."""
    k = len(responses.user) // len(responses.prompts)
    found = {}
    for row, prompt in enumerate(responses.prompt):
        mask = responses.response_mask[row].bool()
        tokens = responses.tokens[row, -responses.max_new_tokens :][mask].tolist()
        key = (int(responses.prompts.users[prompt]), int(responses.prompts.slots[prompt]), row % k)
        found[key] = tokens
    return found


TEXTS: list[Prompt] = ["a", "some longer text", "middle", "xy", "another of them"]
USERS, SLOTS = [3, 3, 7, 8, 12], [0, 1, 0, 0, 0]


def five() -> Prompts:
    return prompts_of(TEXTS, USERS, SLOTS)
