"""Made-up rows, to try on a machine what a run will do with private ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout.batch import Responses, padded_width


def made_up_prompt(policy: CausalLMPolicy, number: int, width: int, longest: int) -> list[int]:
    """Return random tokens that follow from ``number`` alone, of a length padded to ``width``.

    Args:
        policy: The policy, for the size of its vocabulary.
        number: Number of the prompt, the seed of its tokens; prompt 0 fills the width.
        width: Number of columns that the prompt is padded to.
        longest: The run's upper bound on a prompt's tokens.
    """
    random = np.random.default_rng([7, number])
    alike = [n for n in range(1, width + 1) if padded_width(n, longest) == width]
    return _tokens(policy, random, width if number == 0 else int(random.choice(alike)))


def made_up_responses(
    policy: CausalLMPolicy,
    numbers: Sequence[int],
    *,
    rows: int,
    num_generations: int,
    width: int,
    longest: int,
    length: int,
    prompts: int = 1,
) -> Responses:
    """Return rows of random tokens, a user for each number; they follow from that number alone.

    Args:
        policy: The policy, for the size of its vocabulary.
        numbers: Numbers of the users, in the order of their places in a batch.
        rows: Number of rows for each prompt.
        num_generations: Number of adjacent rows that answer the same prompt, token for token.
        width: Number of columns that prompts are padded to.
        longest: The run's upper bound on a prompt's tokens.
        length: Length of a response in tokens.
        prompts: Number of prompts of each user.
    """
    each = prompts * rows
    tokens = torch.full((len(numbers) * each, width + length), policy.tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    prompt: list[int] = []
    for place, number in enumerate(numbers):
        random = np.random.default_rng([8, number])
        for own in range(each):
            row = place * each + own
            if own % num_generations == 0:
                asked = number * each + own // num_generations
                prompt = made_up_prompt(policy, asked, width, longest)
            response = _tokens(policy, random, 1 + int(random.integers(length)) if own else length)
            if length == 1:  # a classifier's answer is the number of a label
                response = [0]
            columns = slice(width - len(prompt), width + len(response))
            tokens[row, columns] = torch.tensor(prompt + response)
            mask[row, columns] = 1
    owner = np.repeat(np.arange(len(numbers)), each)
    asked_by = np.arange(len(owner)) // num_generations
    users: NDArray[np.int64] = owner[::num_generations]
    slots = np.zeros(len(users), dtype=np.int64)
    return Responses(
        tokens=tokens,
        mask=mask,
        prompt=asked_by,
        user=owner,
        from_base=np.zeros(len(owner), dtype=bool),
        texts=[""] * len(owner),
        prompts=Prompts([""] * len(users), users, slots, {}),
        users=len(numbers),
        max_new_tokens=length,
        max_prompt_tokens=longest,
        num_generations=num_generations,
    )


def _tokens(policy: CausalLMPolicy, random: np.random.Generator, count: int) -> list[int]:
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    found: list[int] = random.integers(vocabulary, size=count).tolist()
    return found
