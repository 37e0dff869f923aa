"""Trajectories as rows of a batch, and errors on public ones as one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.users import Prompts
from dprlhf.errors import EXITS, DprlhfError, one_line
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout.batch import Responses, prompt_width, rows_of
from dprlhf.rollout.sampling import text_of_tokens

if TYPE_CHECKING:
    from dprlhf.agents.agent import Trajectory


_NOTHING = {"role": "assistant", "content": ""}


def packed(
    policy: CausalLMPolicy,
    prompts: Prompts,
    rows: Sequence[Trajectory],
    *,
    from_base: NDArray[np.bool_],  # True where a row was sampled from μ, [rows]
    spec: recipe.Rollout,
    longest: int,
    num_generations: int,
    extra: Sequence[str] = (),
) -> Responses:
    """Return trajectories as responses; one that failed has one token, an end token if any."""
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
    values = {
        "environments": [row.environment for row in rows],
        "turn_rewards": [row.turn_rewards or None for row in rows],
    }
    return Responses(
        tokens=tokens,
        mask=mask,
        **rows_of(prompts, k),
        from_base=from_base,
        texts=[text_of_tokens(policy, response) for response in written],
        max_new_tokens=length,
        num_generations=num_generations,
        tool_mask=own,
        completions=[[_NOTHING] if row.failed else row.messages or [_NOTHING] for row in rows]
        or None,
        asked=[row.asked for row in rows] or None,
        extra={name: values[name] for name in extra},
        failed=np.array([row.failed for row in rows], dtype=bool),
    )


def to_one_line_error(problem: BaseException) -> BaseException:
    """Return an error on public prompts as one line; an exit and a clear error stay as they are."""
    if isinstance(problem, (*EXITS, DprlhfError)):
        return problem
    text = one_line(problem)
    return DprlhfError(f"rollout.agent: on a public prompt, {type(problem).__name__}: {text}")
