"""The tokens of rows of data: what a completion adds to its prompt, its end, and packing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout import Responses
from dprlhf.rollout.batch import padded_width


def check_template(data: recipe.Data, users: Users, policy: CausalLMPolicy) -> None:
    """Check that the tokenizer has a chat template if the data are conversations.

    Raises:
        DprlhfError: It has none.
    """
    if users.conversations and policy.tokenizer.chat_template is None:
        raise DprlhfError(
            f"data.prompt_column {data.prompt_column!r} holds conversations, and the policy's"
            " tokenizer has no chat template: take an instruction-tuned model, or give text"
        )


def too_long(model: CausalLMPolicy, prompts: Sequence[Any], most: int) -> list[bool]:
    """Return for each prompt whether it has more than ``most`` tokens, ``[prompts]``."""
    return [len(tokens) > most for tokens in model.encode(prompts, most + 1)]


def completion_tokens(model: CausalLMPolicy, prompt: Any, completion: Any) -> list[int]:
    """Return the completion's tokens after the prompt's, without an end-of-sequence token.

    Raises:
        DprlhfError: The completion is messages, and the tokenizer has no chat template.
    """
    if completion is None:
        return []
    if isinstance(completion, str):
        ids = model.tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)
    if model.tokenizer.chat_template is None:
        raise DprlhfError(
            "a completion is messages, and the tokenizer has no chat template: take an"
            " instruction-tuned model, or give text"
        )
    # A conversation: the text that its template adds after the prompt. A template that opens more
    # for a response than it keeps of one, such as <think>, is followed as far as both agree.
    messages = prompt if isinstance(prompt, list) else []
    template = partial(model.tokenizer.apply_chat_template, **model.chat_template_kwargs)
    whole = template([*messages, *completion], tokenize=False)
    start = template(messages, tokenize=False, add_generation_prompt=True) if messages else ""
    alike = list(takewhile(lambda two: two[0] == two[1], zip(whole, start, strict=False)))
    rest = whole[len(alike) :]
    ids = model.tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"]
    return list(ids)


def after_start(model: CausalLMPolicy, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return a completion's tokens without the start token that is its whole prompt already.

    An empty prompt is read as the start token, and a template writes that, too, at the start of a
    conversation: the model would learn it after itself.

    Args:
        model: The model, whose tokenizer is used.
        prompt: The tokens of the prompt.
        tokens: The tokens of the completion.
    """
    start = model.tokenizer.bos_token_id
    twice = start is not None and prompt == [start] and tokens[:1] == [start]
    return tokens[1:] if twice else tokens


def end_token(model: CausalLMPolicy) -> int:
    """Return the token that is learnt at the end of a text.

    Raises:
        DprlhfError: The tokenizer has none, or the model has no embedding for it.
    """
    end: int | None = model.tokenizer.eos_token_id
    if end is None:
        raise DprlhfError(
            "the tokenizer has no end-of-sequence token, which is learnt after each text: set"
            " eos_token in the model's tokenizer_config.json"
        )
    model.known([end])
    return end


def ended(model: CausalLMPolicy, completion: Any, tokens: list[int]) -> list[int]:
    """Return the completion's tokens and an end; a template may have written it, and a newline."""
    end = end_token(model)
    by_template = not isinstance(completion, str) and end in tokens[-2:]
    return tokens if by_template else [*tokens, end]


def pack(
    model: CausalLMPolicy,
    examples: Prompts,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    length: int,
    max_prompt_tokens: int,
) -> Responses:
    """Pack prompts, padded on the left, and answers, padded on the right, into rows of tokens.

    Raises:
        DprlhfError: The model has no embedding for one of the tokens.
    """
    width = int(padded_width(max(map(len, prompts), default=0), max_prompt_tokens))
    tokens = torch.full((len(prompts), width + length), model.tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        place = slice(width - len(prompt), width + len(answer))
        tokens[row, place] = torch.tensor(model.known([*prompt, *answer]))
        mask[row, place] = 1
    copies = len(prompts) // len(examples) if len(examples) else 1
    own, user = np.unique(examples.users, return_inverse=True)
    return Responses(
        tokens=tokens,
        mask=mask,
        prompt=np.repeat(np.arange(len(examples)), copies),
        user=np.repeat(user, copies),
        from_base=np.zeros(len(prompts), dtype=bool),
        texts=[""] * len(prompts),
        prompts=examples,
        users=len(own),
        max_new_tokens=length,
        max_prompt_tokens=max_prompt_tokens,
    )
