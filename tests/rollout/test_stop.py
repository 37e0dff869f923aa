"""Stop strings, responses that did not end, and a run with every setting of sampling."""

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dprlhf import DprlhfError
from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.warpers import StopStrings
from dprlhf.rollout import Responses
from dprlhf.rollout.sampling import ended
from dprlhf.training.evaluate import measure
from helpers import sampled
from helpers.marks import slow
from helpers.policies import policy_of

EOS = 0
LENGTH = 24


def stopped_at(*strings: str) -> CausalLMPolicy:
    policy = copy.deepcopy(policy_of("llama"))
    policy.stop = StopStrings(policy.tokenizer, strings) if strings else None
    return policy


def texts(count: int = 12) -> Prompts:
    """Prompts that end with the start of a stop string."""
    return sampled.prompts_of([f"{i} ab" for i in range(count)])


def draw(policy: CausalLMPolicy, prompts: Prompts, **changes: Any) -> Responses:
    own = {"max_new_tokens": LENGTH, "batch_size": 8, "key": bytes(32), "context": ("stop",)}
    return sampled.draw(policy, prompts, **own | changes)


def tokens_of(responses: Responses) -> list[list[int]]:
    rows = zip(responses.tokens[:, -LENGTH:], responses.response_mask.bool(), strict=True)
    return [tokens[real].tolist() for tokens, real in rows]


def bytes_of(policy: CausalLMPolicy, tokens: list[int]) -> str:
    """One character a token, so that tokens that are no UTF-8 by themselves count too."""
    return "".join(policy.tokenizer.convert_ids_to_tokens(tokens))


def frequent(policy: CausalLMPolicy, width: int) -> str:
    """A string of some letters that several responses have, and not at their end alone."""
    found: dict[str, int] = {}
    for tokens in tokens_of(draw(policy, texts())):
        letters = bytes_of(policy, [token for token in tokens if token != EOS])
        for text in {letters[i : i + width] for i in range(len(letters) - width)}:
            if text.isascii() and text.isalnum():
                found[text] = found.get(text, 0) + 1
    return max(found, key=lambda text: found[text])


@pytest.mark.parametrize("widths", [slow((1,)), slow((2,)), (1, 2)])
def test_a_response_ends_at_its_first_stop_string_and_is_the_same_until_there(widths):
    plain = stopped_at()
    strings = [frequent(plain, width) for width in widths]
    policy, cut = stopped_at(*strings), 0
    for whole, found in zip(
        tokens_of(draw(plain, texts())), tokens_of(draw(policy, texts())), strict=True
    ):
        ends = [
            n
            for n in range(1, len(whole) + 1)
            if any(bytes_of(plain, whole[:n]).endswith(string) for string in strings)
        ]
        expected = whole[: ends[0]] if ends else whole
        assert found == expected
        cut += len(expected) < len(whole)
    assert cut > (3 if 1 in widths else 0)


def test_the_prompts_text_is_no_part_of_a_stop_string() -> None:
    """Every prompt ends with "ab"; a response that starts with "c" does not complete "abc"."""
    policy = stopped_at("abc", "bc")
    letters = policy.tokenizer("c")["input_ids"]
    assert not bool(policy.stop.completed(torch.tensor([letters]))[0])
    assert bool(policy.stop.completed(torch.tensor([policy.tokenizer("xbc")["input_ids"]]))[0])


@pytest.mark.slow
def test_what_a_user_gets_does_not_depend_on_the_batch() -> None:
    policy = stopped_at(frequent(stopped_at(), 1))
    whole = tokens_of(draw(policy, texts()))
    assert tokens_of(draw(policy, texts(), batch_size=3)) == whole
    assert tokens_of(draw(policy, texts(4))) == whole[:8]


@pytest.mark.slow
def test_ended_responses_and_those_that_are_left_out() -> None:
    string = frequent(stopped_at(), 1)
    policy = stopped_at(string)
    responses = draw(policy, texts(), responses=4, mask_truncated=True)
    tokens = tokens_of(responses)
    expected = [t[-1] == EOS or bytes_of(policy, t).endswith(string) for t in tokens]
    assert ended(policy, responses).tolist() == expected
    assert 0 < sum(expected) < len(expected)
    assert any(len(t) == LENGTH for t, done in zip(tokens, expected, strict=True) if not done)
    assert responses.left_out.tolist() == [not done for done in expected]
    assert draw(policy, texts()).left_out is None
    messages = [[{"role": "assistant", "content": text}] for text in responses.texts]
    some = dataclasses.replace(responses, completions=messages).take(np.array([5, 2]))
    assert some.completions == [messages[5], messages[2]]
    assert some.left_out.tolist() == [not expected[5], not expected[2]]
    assert measure(policy, responses, None)["ended_share"].mean == np.mean(expected)


def test_tokens_of_a_tool_end_no_response() -> None:
    policy = stopped_at()
    responses = draw(policy, texts())
    own = responses.response_mask.clone()
    last = own.sum(1) - 1
    done = ended(policy, responses)
    own[torch.arange(len(own)), last] = 0
    answered = Responses(**{**vars(responses), "tool_mask": own})
    assert done.any()
    assert not ended(policy, answered).any()


def test_a_string_that_no_token_can_write_is_refused() -> None:
    inner = Tokenizer(models.WordLevel({"a": 0, "abcdef": 1, "<eos>": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    with pytest.raises(DprlhfError, match=r"rollout.stop \['§'\]: "):
        StopStrings(tokenizer, ["§"])
