"""A cache with room for what is to come: the same responses, and nothing is copied at a step."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from dprlhf.policies.loading import make_policy
from dprlhf.recipe import Adapter
from dprlhf.rollout import decoding
from dprlhf.rollout.decoding import ReservedLayer, reserve
from helpers import tiny


def filled(places: int) -> DynamicCache:
    random = torch.Generator().manual_seed(places)
    cache = DynamicCache()
    for layer in range(2):
        keys, values = torch.randn(2, 3, 2, places, 4, generator=random, dtype=torch.float64)
        cache.update(keys, values, layer)
    return cache


@pytest.mark.parametrize("each", [1, 3])
def test_it_holds_what_a_copied_cache_holds(each: int) -> None:
    ours, theirs = filled(5), filled(5)
    reserve(ours, 4 * each)
    assert [type(layer) for layer in ours.layers] == [ReservedLayer] * 2
    place = ours.layers[0].keys.data_ptr()
    random = torch.Generator().manual_seed(0)
    for _ in range(4):
        for layer in range(2):
            keys, values = torch.randn(2, 3, 2, each, 4, generator=random, dtype=torch.float64)
            found, expected = ours.update(keys, values, layer), theirs.update(keys, values, layer)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.layers[0].keys.data_ptr() == place  # it never moved
    with pytest.raises(ValueError, match="reserved"):
        ours.update(keys, values, 0)


def test_other_kinds_of_layers_are_left_alone() -> None:
    class Window(DynamicLayer):
        pass

    cache = filled(3)
    cache.layers[1] = Window()
    reserve(cache, 2)
    assert [type(layer) for layer in cache.layers] == [ReservedLayer, Window]


@pytest.mark.parametrize("responses", [1, 4])  # four go behind one copy of their prompt
def test_decoding_samples_the_same(responses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(
        tiny.model("llama").double(), tiny.tokenizer(), Adapter(type="lora", rank=1)
    )
    assert policy.shared_cache(responses, 12, 6) == responses
    prompts = [[5, 6, 7], list(range(1, 13)), [9], None]
    uniforms = torch.rand(4, responses, 6, generator=torch.Generator().manual_seed(3)).double()
    made = []

    def watched(cache: DynamicCache, more: int) -> None:
        reserve(cache, more)
        made.append(cache)

    monkeypatch.setattr(decoding, "reserve", watched)
    found = decoding.decode(policy, prompts, uniforms, width=12)
    monkeypatch.setattr(decoding, "reserve", lambda cache, more: None)
    assert found == decoding.decode(policy, prompts, uniforms, width=12)
    assert made
    assert isinstance(made[0].layers[0], ReservedLayer)
    monkeypatch.setattr(decoding, "reserve", lambda cache, more: reserve(cache, 1))
    with pytest.raises(ValueError, match="reserved"):
        decoding.decode(policy, prompts, uniforms, width=12)
