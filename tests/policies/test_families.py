"""Families of models: windows, states, positions of their own, image towers."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig

from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import context_length, prompt_room
from dprlhf.recipe import Data, Rollout
from dprlhf.rollout.decoding import try_last_step
from dprlhf.training.setup import with_prompt_width
from helpers import families
from helpers.autograd import relative_error
from helpers.families import PROMPTS, padded_logprobs, plain_logprobs, sampled_logprobs
from helpers.recipes import least

KINDS = [
    "gemma2", "mistral-window", "modernbert-decoder", "llama4_text", "zamba2", "bamba", "lfm2",
    "qwen3_next", "biogpt", "roberta",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_and_gradients_take_the_models_own_distribution(kind: str) -> None:
    """Neither padding, the cache nor other rows change the probability of a token."""
    policy = families.policy(kind)
    sampled = sampled_logprobs(policy)
    padded = padded_logprobs(policy, [response for response, _ in sampled])
    for prompt, (response, drawn), of_pass in zip(PROMPTS, sampled, padded, strict=True):
        expected = plain_logprobs(policy, prompt, response)
        torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(of_pass, expected, rtol=0, atol=1e-5)
    others = sampled_logprobs(policy, [[1, 2, 3], PROMPTS[1], [50] * 9])
    assert others[1][0] == sampled[1][0]
    assert torch.equal(others[1][1], sampled[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_step_is_tried_at_its_full_length(kind: str) -> None:
    policy, masks = families.policy(kind), []
    policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"].shape), with_kwargs=True
    )
    try_last_step(policy, size=3, width=16, num_generations=2, max_new_tokens=12)
    assert masks[-1] == (6, 1 + 16 + 11)


@pytest.mark.parametrize("kind", ["gemma3_text", "xglm", "biogpt", "zamba2", "falcon_h1", "lfm2"])
def test_checkpoints_change_no_gradient(kind: str) -> None:
    """A layer is computed again in the mode in which it was computed: dropout stays off."""
    targets = {"falcon_h1": ["in_proj", "q_proj"]}.get(kind, "all-linear")
    policy = families.policy(kind, target_modules=targets)
    policy.checkpoint_layers()
    found, truth = families.gradients(policy)
    assert relative_error(found, truth) < 1e-5


def test_an_image_tower_is_not_trained() -> None:
    """It has query projections and layers with the numbers of the text model's, too."""
    for chosen in (
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "layers": [-1]},
    ):
        policy = families.policy("gemma3", **chosen)
        assert policy.parameters
        assert all("language_model" in name for name in policy.parameters)
    assert all(".layers.1." in name for name in policy.parameters)
    whole = families.policy("gemma3", adapter="full")
    assert whole.dimension == sum(p.numel() for p in whole.model.model.language_model.parameters())


def test_a_weight_that_another_module_reads_has_no_adapter() -> None:
    """Jamba's mixer multiplies by its layer's weight itself: an adapter there would do nothing."""
    policy = families.policy("jamba")
    assert not any("dt_proj" in name for name in policy.parameters)
    assert any("dt_proj" in name for name in families.policy("jamba", adapter="full").parameters)


@pytest.mark.parametrize(
    ("config", "room"),
    [
        (AutoConfig.for_model("gpt2", n_positions=256), 256),
        (AutoConfig.for_model("mpt", max_seq_len=256), 256),
        (AutoConfig.for_model("mistral", max_position_embeddings=256, sliding_window=8), 256),
        (AutoConfig.for_model("gemma3", text_config={"max_position_embeddings": 256}), 256),
        (AutoConfig.for_model("bloom"), float("inf")),
    ],
)
def test_the_longest_prompt_follows_from_the_context(config: Any, room: float) -> None:
    assert context_length(config) == room
    assert prompt_room(context_length(config), 200, 64) == min(room - 200, 64)
    assert prompt_room(context_length(config), 999, 64) == (64 if room > 999 else 1)


@pytest.mark.parametrize("kind", ["gpt2", "roberta"])
def test_the_last_position_is_the_last_that_the_model_has(kind: str) -> None:
    """A response that has ended is computed on there, in a batch with longer ones."""
    policy = families.policy(kind)
    places = [m for name, m in policy.network.named_modules() if "position_emb" in name] or [
        policy.network.get_submodule("transformer.wpe")
    ]
    assert policy.last_position == places[0].weight.shape[0] - 1


SHORT = {"max_new_tokens": 4}


@pytest.mark.parametrize(
    ("stated", "tools", "width"),
    [({}, 0, 48), ({"max_prompt_tokens": 60}, 0, 60), ({"max_prompt_tokens": 60}, 60, 60)],
)
def test_a_short_context_shortens_the_default_prompt(stated, tools, width):
    policy = families.policy("gpt2")
    rollout = {"max_new_tokens": policy.room - 48}
    settings = least(data={"path": "in-memory", **stated}, rollout=rollout)
    settled = with_prompt_width(settings, policy, tools=tools)
    assert settled.data.max_prompt_tokens == width
    with pytest.raises(DprlhfError, match=f"max_prompt_tokens {width}: the tools alone take 61"):
        with_prompt_width(settings, policy, tools=61)


def test_the_default_prompt_has_room_for_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = families.policy("gpt2")
    monkeypatch.setattr(policy, "room", 4096)
    settings = least(rollout=SHORT)
    widths = [with_prompt_width(settings, policy, tools=n).data.max_prompt_tokens for n in (0, 900)]
    assert widths == [512, 1412]


def test_the_longest_prompt_follows_from_public_rows() -> None:
    policy = families.policy("gpt2")
    texts = [*["x" * 17] * 199, "y" * 40]  # one of two hundred is longer; a byte is a token
    public = Users(Dataset.from_dict({"prompt": texts}), Data(path="in-memory"))
    settings = least(rollout=SHORT)
    assert with_prompt_width(settings, policy, public).data.max_prompt_tokens == 32
    short = settings.model_copy(update={"rollout": Rollout(max_new_tokens=policy.room - 20)})
    assert with_prompt_width(short, policy, public).data.max_prompt_tokens == 20
