"""Trajectories as rows of a batch, and errors on public ones as one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.users import Prompts
from dprlhf.errors import EXITS, DprlhfError, one_line
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout.batch import Responses, prompt_width, rows_of
from dprlhf.rollout.sampling import text_of_tokens


@dataclass(repr=False, eq=False)
class Row:
    """A finished trajectory.

    Attributes:
        prompt: The prompt's tokens.
        tokens: The response: what the policy wrote and what tools answered.
        own: 1 for each of these that the policy wrote, else 0.
        asked: The conversation that the policy answers; None for that of the dataset.
        messages: The turns and answers as messages; None for the text alone.
        extra: Further values for rewards, by name.
        failed: Whether it broke off with an error.
    """

    prompt: list[int]
    tokens: list[int]
    own: list[int]
    asked: Any = None
    messages: list[dict[str, Any]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    failed: bool = False


def packed(
    policy: CausalLMPolicy,
    prompts: Prompts,
    rows: Sequence[Row],
    *,
    from_base: NDArray[np.bool_],
    spec: recipe.Rollout,
    longest: int,
    num_generations: int,
    extra: Sequence[str] = (),
) -> Responses:
    """Return trajectories as responses; one that failed has one token, of an end if there is any.

    Args:
        policy: The policy, for its tokenizer.
        prompts: The prompts; each has ``spec.responses`` adjacent rows.
        rows: The trajectories.
        from_base: True where a row was sampled from μ, ``[rows]``.
        spec: The rollout settings.
        longest: The longest prompt in tokens; a longer one keeps its last tokens.
        num_generations: Number of adjacent rows that answer the same tokens, a public number.
        extra: Names of the further values.
    """
    k, length = spec.responses, spec.max_new_tokens
    end = policy.end_tokens[0] if policy.end_tokens else policy.tokenizer.pad_token_id
    given = [list(row.prompt[-longest:]) or [end] for row in rows]
    width = prompt_width(prompts, given, longest)
    tokens = torch.full((len(rows), width + length), policy.tokenizer.pad_token_id)
    mask, own = torch.zeros_like(tokens), torch.zeros(len(rows), length, dtype=torch.long)
    written = []
    for number, (row, prompt) in enumerate(zip(rows, given, strict=True)):
        nothing = row.failed or not row.tokens
        response = [end] if nothing else list(row.tokens[:length])
        columns = slice(width - len(prompt), width + len(response))
        tokens[number, columns] = torch.tensor(prompt + response)
        mask[number, columns] = 1
        own[number, : len(response)] = torch.tensor([1] if nothing else row.own[:length])
        written.append(response)
    messages = [row.messages for row in rows if row.messages is not None]
    return Responses(
        tokens=tokens,
        mask=mask,
        **rows_of(prompts, k),
        from_base=from_base,
        texts=[text_of_tokens(policy, response) for response in written],
        max_new_tokens=length,
        num_generations=num_generations,
        tool_mask=own,
        completions=messages if len(messages) == len(rows) and rows else None,
        asked=[row.asked for row in rows] if any(row.asked is not None for row in rows) else None,
        extra={name: [row.extra.get(name) for row in rows] for name in extra},
        failed=np.array([row.failed for row in rows], dtype=bool),
    )


def to_one_line_error(problem: BaseException) -> BaseException:
    """Return an error on public prompts as one line; an exit and a clear error stay as they are."""
    if isinstance(problem, (*EXITS, DprlhfError)):
        return problem
    text = one_line(problem)
    return DprlhfError(f"rollout.agent: on a public prompt, {type(problem).__name__}: {text}")
