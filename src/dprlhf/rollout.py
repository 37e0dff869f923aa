"""Sampling: y ~ μ and y′ ~ π_t, several responses for each prompt (He & Zhou, Algorithm 1).

A matrix product rounds differently when its shape changes, and a rounded probability can change a
sampled token. If the shape of a micro-batch depended on who is in it, one user could so move what
others contribute, by far more than the clip norm allows. Micro-batches therefore have fixed shapes:
a row's prompt is padded to a width that its own length decides, and missing rows are filled up.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private, open_private
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.randomness import uniforms
from dprlhf.users import Prompts

Tick = Callable[[int], None]
"""Called with the number of rows done since the last call."""


@dataclass(frozen=True, repr=False)
class Responses:
    """All responses of one round (or of an evaluation). A row is one response.

    Attributes:
        tokens: prompt and response, ``[rows, prompt + response]``; prompts are padded on the left,
            responses on the right.
        mask: 1 where a token is real, same shape.
        prompt: which prompt a row answers, ``[rows]``; rows of a prompt are adjacent.
        user: which user a row belongs to, ``[rows]``, counted from 0 within the batch.
        from_base: True where the row was sampled from μ, ``[rows]``.
        texts: the responses as text, ``[rows]``.
        prompts: the prompts as the dataset holds them.
        users: the number of users in the batch.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    prompt: NDArray[np.int64]
    user: NDArray[np.int64]
    from_base: NDArray[np.bool_]
    texts: list[str]
    prompts: Prompts
    users: int
    length: int

    @property
    def response_mask(self) -> torch.Tensor:
        """1 where a response token is real, ``[rows, response]``."""
        return self.mask[:, -self.length :]

    @property
    def widths(self) -> NDArray[np.int64]:
        """The width that each row's prompt is padded to, ``[rows]``; its own length decides."""
        lengths = self.mask[:, : -self.length].sum(1).numpy()
        widths: NDArray[np.int64] = padded_width(lengths)
        return widths

    def micro_batch(
        self, chosen: NDArray[np.int64], width: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and mask of some rows at a fixed shape, ``[size, width + response]``.

        Rows from ``len(chosen)`` on are fillers: one token repeated after a prompt of one token,
        no part of any user.
        """
        missing = (width + self.length - self.tokens.shape[1], 0)
        filling = (0, 0, 0, size - len(chosen))
        # A negative pad cuts: the columns on the left are padding in all of these rows.
        tokens, mask = (F.pad(t[chosen], missing) for t in (self.tokens, self.mask))
        tokens, mask = F.pad(tokens, filling), F.pad(mask, filling)
        mask[len(chosen) :, width - 1 :] = 1
        return tokens, mask


_WIDTH_STEP = 16


def padded_width(length: Any) -> Any:
    """Round a prompt's length up to a multiple of 16."""
    return -(-length // _WIDTH_STEP) * _WIDTH_STEP


class _InverseCDF:
    """A transformers logits processor that turns greedy decoding into reproducible sampling.

    Each row has its own uniform number for each step, so what a user samples does not depend on
    who else is in the micro-batch or on which process it runs.
    """

    def __init__(self, uniforms: torch.Tensor, temperature: float, start: int) -> None:
        self.uniforms = uniforms
        self.temperature = temperature
        self.start = start

    def __call__(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # float64: in float32 a late token's mass drowns in what stands before it, and a uniform
        # number can round to 1.
        probabilities = (logits.float() / self.temperature).softmax(1)
        cumulative = probabilities.cumsum(1, dtype=torch.float64)
        step = tokens.shape[1] - self.start
        threshold = self.uniforms[:, step, None] * cumulative[:, -1:]
        # "right": the first token whose cumulative mass exceeds the threshold, never one of mass 0.
        chosen = torch.searchsorted(cumulative, threshold, right=True)
        chosen = chosen.clamp(max=logits.shape[1] - 1)
        return torch.full_like(logits, -torch.inf).scatter_(1, chosen, 0.0)


def sample_responses(
    policy: CausalLMPolicy,
    prompts: Private[Prompts],
    spec: recipe.Rollout,
    *,
    key: bytes,
    round_: int,
    max_prompt_tokens: int,
    tick: Tick | None = None,
) -> Private[Responses]:
    """Sample this round's responses for the private users' prompts."""
    opened = open_private(prompts)
    return Private(
        sample(
            policy,
            opened,
            spec,
            key=key,
            context=("rollout", round_),
            max_prompt_tokens=max_prompt_tokens,
            tick=tick,
        )
    )


def sample(
    policy: CausalLMPolicy,
    prompts: Prompts,
    spec: recipe.Rollout,
    *,
    key: bytes,
    context: tuple[str | int, ...],
    max_prompt_tokens: int,
    tick: Tick | None = None,
) -> Responses:
    """Sample ``spec.responses`` responses for each prompt.

    With ``base_policy: reference`` the first half of a prompt's rows come from μ (the adapter
    off) and the rest from π_t; with ``on-policy`` all come from π_t.

    Args:
        key: seeds the sampling; a row's draws depend on ``context``, its user, the user's prompt
            and the response's number, and on nothing else.
    """
    k, length = spec.responses, spec.max_new_tokens
    encoded = policy.encode(prompts.prompts, max_prompt_tokens)
    rows = len(prompts) * k
    widths = np.array([padded_width(len(e)) for e in encoded], dtype=np.int64)
    width = int(widths.max(initial=0))
    pad = policy.tokenizer.pad_token_id
    tokens = torch.full((rows, width + length), pad)
    mask = torch.zeros_like(tokens)
    from_base = np.tile(
        np.arange(k) < (k // 2 if spec.base_policy == "reference" else 0), len(prompts)
    )
    draws = _draws(prompts, key, context, k, length)
    width_of_row = np.repeat(widths, k)
    for base, narrow in itertools.product((True, False), np.unique(widths)):
        alike = np.flatnonzero((from_base == base) & (width_of_row == narrow))
        for start in range(0, len(alike), spec.batch_size):
            chosen = alike[start : start + spec.batch_size]
            ids = [encoded[row // k] for row in chosen]
            with policy.base() if base else contextlib.nullcontext():
                responses = _generate(policy, ids, draws[chosen], spec, int(narrow))
            for row, prompt, response in zip(chosen, ids, responses, strict=True):
                tokens[row, width - len(prompt) : width] = torch.tensor(prompt)
                tokens[row, width : width + len(response)] = torch.tensor(response)
                mask[row, width - len(prompt) : width + len(response)] = 1
            if tick is not None:
                tick(len(chosen))
    _, user = np.unique(prompts.users, return_inverse=True)
    texts = [
        policy.tokenizer.decode(t[m.bool()], skip_special_tokens=True)
        for t, m in zip(tokens[:, width:], mask[:, width:], strict=True)
    ]
    return Responses(
        tokens=tokens,
        mask=mask,
        prompt=np.repeat(np.arange(len(prompts)), k),
        user=np.repeat(user, k),
        from_base=from_base,
        texts=texts,
        prompts=prompts,
        users=len(np.unique(prompts.users)),
        length=length,
    )


def _draws(
    prompts: Prompts, key: bytes, context: tuple[str | int, ...], k: int, length: int
) -> torch.Tensor:
    """Return one uniform number for each token to come, ``[rows, length]``."""
    draws = [
        uniforms(key, *context, int(user), int(slot), count=k * length).reshape(k, length)
        for user, slot in zip(prompts.users, prompts.slots, strict=True)
    ]
    return torch.from_numpy(np.concatenate(draws) if draws else np.empty((0, length)))


@torch.no_grad()
def _generate(
    policy: CausalLMPolicy,
    prompts: Sequence[list[int]],
    draws: torch.Tensor,
    spec: recipe.Rollout,
    width: int,
) -> list[list[int]]:
    """Sample one response for each prompt, as ``spec.batch_size`` rows of ``width`` tokens."""
    from transformers import GenerationConfig, LogitsProcessorList

    eos, pad = policy.tokenizer.eos_token_id, policy.tokenizer.pad_token_id
    ids = torch.full((spec.batch_size, width), pad)
    mask = torch.zeros_like(ids)
    mask[:, -1] = 1
    uniform = torch.full((spec.batch_size, spec.max_new_tokens), 0.5, dtype=torch.float64)
    uniform[: len(prompts)] = draws
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    device = policy.device
    sampler: Any = _InverseCDF(uniform.to(device), policy.temperature, width)
    out = policy.model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        logits_processor=LogitsProcessorList([sampler]),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=spec.max_new_tokens,
            eos_token_id=eos,
            pad_token_id=pad,
        ),
    )[: len(prompts), width:].tolist()
    # The end-of-sequence token is part of the response: its probability is the policy's too.
    return [row[: row.index(eos) + 1] if eos in row else row for row in out]
