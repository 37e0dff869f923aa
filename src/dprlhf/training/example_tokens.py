"""The tokens of rows of data: what a completion adds to its prompt, its end, and packing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout import Responses
from dprlhf.rollout.batch import prompt_width, rows_of


def check_template(data: recipe.Data, users: Users, policy: CausalLMPolicy) -> None:
    """Check that the tokenizer has a chat template if the data are conversations."""
    if users.conversations and policy.tokenizer.chat_template is None:
        raise DprlhfError(
            f"data.prompt_column {data.prompt_column!r} holds conversations, and the policy's"
            " tokenizer has no chat template: take an instruction-tuned model, or give text"
        )


def split_row(
    model: CausalLMPolicy,
    prompt: Any,
    completions: Sequence[Any],  # Texts (without an end, which is added later) or messages
    row: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a row's prompt, and of each completion after it.

    Of a conversation, prompt and completion together are what the chat template writes for the
    whole of it, token for token. A template may open more for a response than it keeps of one, such
    as ``<think>``; so the prompt ends where its rendering and that of the whole part (as in TRL).
    Texts are tokenized one after the other.
    """
    messages = prompt if isinstance(prompt, list) else []
    if isinstance(prompt, str) or messages:
        (start,) = model.encode([prompt], sys.maxsize, [row or {}])
    else:
        start = []
    learnt = []
    for completion in completions:
        if completion is None or isinstance(completion, str):
            text = completion or ""
            ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            learnt.append(list(ids))
        elif model.tokenizer.chat_template is None:
            raise DprlhfError(
                "a completion is messages, and the tokenizer has no chat template: take an"
                " instruction-tuned model, or give text"
            )
        else:
            learnt.append(model.render([*messages, *completion], row=row))
    if messages:
        whole = [isinstance(completion, list) for completion in completions]
        ends = [in_common(start, t) for t, w in zip(learnt, whole, strict=True) if w]
        start = start[: min(ends, default=len(start))]
        learnt = [t[len(start) :] if w else t for t, w in zip(learnt, whole, strict=True)]
    start = start or [model.start_token]
    if start == [model.tokenizer.bos_token_id]:
        # An empty prompt is read as the start token. A template writes that, too, at the start of
        # a conversation: the model would learn it after itself.
        learnt = [tokens[1:] if tokens[:1] == start else tokens for tokens in learnt]
    return start, learnt


def in_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many items two sequences begin with that are the same.

    >>> in_common("abcd", "abed")
    2
    """
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(a, b, strict=False)))


def end_token(model: CausalLMPolicy) -> int:
    """Return the token that is learnt at the end of a text."""
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
    """Pack prompts, padded on the left, and answers, padded on the right, into rows of tokens."""
    width = prompt_width(examples, prompts, max_prompt_tokens)
    tokens = torch.full((len(prompts), width + length), model.tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        place = slice(width - len(prompt), width + len(answer))
        tokens[row, place] = torch.tensor(model.known([*prompt, *answer]))
        mask[row, place] = 1
    copies = len(prompts) // len(examples) if len(examples) else 1
    return Responses(
        tokens=tokens,
        mask=mask,
        **rows_of(examples, copies),
        from_base=np.zeros(len(prompts), dtype=bool),
        texts=[""] * len(prompts),
        max_new_tokens=length,
    )
