"""Made-up rows, to try on a machine what a run will do with private ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout.batch import Responses, rows_of


def made_up_prompt(policy: CausalLMPolicy, number: int, longest: int, part: int = 0) -> list[int]:
    """Return random tokens that follow from ``number`` and ``part`` alone."""
    random = np.random.default_rng([7, number, part])
    lengths = longest, 1, 1 + int(random.integers(longest))
    return _tokens(policy, random, lengths[number % 3])


def made_up_responses(
    policy: CausalLMPolicy,
    numbers: Sequence[int | None],
    *,
    rows: int,
    num_generations: int,
    width: int,
    length: int,
    prompts: int = 1,
) -> Responses:
    """Return rows of random tokens, a user for each number; they follow from that number alone."""
    each, present = prompts * rows, [n for n in numbers if n is not None]
    tokens = torch.full((len(present) * each, width + length), policy.tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    prompt: list[int] = []
    for start, number in enumerate(present):
        random = np.random.default_rng([8, number])
        for own in range(each):
            row = start * each + own
            if own % num_generations == 0:
                prompt = made_up_prompt(policy, number, width, own // num_generations)
            response = _tokens(policy, random, 1 + int(random.integers(length)) if own else length)
            if length == 1:  # a classifier's answer is the number of a label
                response = [0]
            columns = slice(width - len(prompt), width + len(response))
            tokens[row, columns] = torch.tensor(prompt + response)
            mask[row, columns] = 1
    places = np.array([place for place, n in enumerate(numbers) if n is not None], dtype=np.int64)
    users = np.repeat(places, prompts)
    slots = np.tile(np.arange(prompts), len(places))
    asked = Prompts(
        [""] * len(users),
        users,
        slots,
        {},
        round_users=np.arange(len(numbers)),
        prompts_a_user=prompts,
    )
    return Responses(
        tokens=tokens,
        mask=mask,
        **rows_of(asked, rows),
        from_base=np.zeros(len(tokens), dtype=bool),
        texts=[""] * len(tokens),
        max_new_tokens=length,
        num_generations=num_generations,
    )


@contextlib.contextmanager
def random_adapter(policy: CausalLMPolicy, by: float = 0.02) -> Iterator[None]:
    """Move the trained parameters by PUBLIC random numbers of this scale, inside the context."""
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in policy.parameters.values():
                p.add_(by * torch.randn(p.shape, generator=generator).to(p))
        yield
    finally:
        with torch.no_grad():
            for name, p in policy.parameters.items():
                p.copy_(before[name])


def _tokens(policy: CausalLMPolicy, random: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = random.integers(policy.embeddings, size=count).tolist()
    return tokens
