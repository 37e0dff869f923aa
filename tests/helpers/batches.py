"""Random batches of responses in a given shape, without a model that sampled them."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.data.users import Prompts
from dprlhf.rollout import Responses

EOS = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a batch: for each user the lengths of its prompts; k responses to each."""

    prompts: list[list[int]]
    k: int
    length: int


def rows_of(
    tokens: torch.Tensor,
    mask: torch.Tensor,
    each: int,
    length: int,
    *,
    from_base: Sequence[bool] = (False,),
    owner: NDArray[np.int64] | None = None,
    copies: int = 1,
) -> Responses:
    """Return tokens as responses, ``each`` to a prompt; without ``owner`` a prompt is a user."""
    prompts = len(tokens) // each
    user = np.arange(prompts) if owner is None else owner
    return Responses(
        tokens=tokens, mask=mask, prompt=np.repeat(np.arange(prompts), each),
        user=np.repeat(user, each), from_base=np.resize(from_base, len(tokens)),
        texts=[""] * len(tokens), users=int(user.max(initial=-1)) + 1, max_new_tokens=length,
        prompts=Prompts([""] * prompts, user, np.zeros(prompts, dtype=np.int64), {}),
        num_generations=copies,
    )  # fmt: skip


def batch_of(
    shape: Shape, seed: int, shuffled: bool = False, copies: int | None = None
) -> Responses:
    """Random tokens in that shape, with early ends, and rubbish where there is no token.

    A prompt's rows go behind one copy of it; ``copies=1`` keeps them apart.
    """
    random = np.random.default_rng(seed)
    lengths = [n for user in shape.prompts for n in user]
    width = max(lengths)
    rows = len(lengths) * shape.k
    tokens = random.integers(1, 257, (rows, width + shape.length))
    tokens[:, :width] = tokens[:: shape.k, :width].repeat(shape.k, axis=0)
    mask = np.zeros_like(tokens)
    for row in range(rows):
        prompt = lengths[row // shape.k]
        response = int(random.integers(1, shape.length + 1))
        if response < shape.length:
            tokens[row, width + response - 1] = EOS
        mask[row, width - prompt : width + response] = 1
    owner = np.repeat(np.arange(len(shape.prompts)), [len(p) for p in shape.prompts])
    if shuffled:  # a user's prompts need not stand together
        owner = random.permutation(owner)
    both = torch.from_numpy(tokens), torch.from_numpy(mask)
    return rows_of(*both, shape.k, shape.length, owner=owner, copies=copies or shape.k)


def half_from_base(responses: Responses) -> Responses:
    """Return the same rows, of which the first half of each prompt's are the base policy's."""
    k = len(responses.user) // len(responses.prompts)
    arms = np.tile(np.arange(k) < k // 2, len(responses.prompts))
    return dataclasses.replace(responses, from_base=arms)


def with_tools(shape: Shape, seed: int) -> Responses:
    """Random responses in which a third of the tokens, never the first, came from tools."""
    responses = batch_of(shape, seed)
    random = np.random.default_rng(seed)
    own = torch.from_numpy((random.random(tuple(responses.response_mask.shape)) > 0.3).astype(int))
    own[:, 0] = 1
    assert bool((own * responses.response_mask != responses.response_mask).any(1)[:4].any())
    return dataclasses.replace(responses, tool_mask=own)


MIXED = Shape(prompts=[[5, 1, 3], [2], [7], [1, 1], [4, 6, 2]], k=3, length=5)
