"""What sampling returns, and how its rows become micro-batches of fixed shape and place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.data.users import Prompts, in_grid
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.kept import Kept, Replay

Tick = Callable[[int], None]
"""Called with the number of rows done since the last call."""


@dataclass(frozen=True, repr=False)
class Responses:
    """All responses of one round (or of an evaluation). A row is one response."""

    tokens: torch.Tensor  # [rows, prompt + response]
    mask: torch.Tensor  # 1 where a token is real, [rows, prompt + response]
    prompt: NDArray[np.int64]  # [rows]; rows of a prompt are adjacent
    user: NDArray[np.int64]  # [rows]; in a private round the rank among the round's users
    from_base: NDArray[np.bool_]  # True where the row was sampled from μ, [rows]
    texts: list[str]  # The responses as text, [rows]
    prompts: Prompts  # The prompts in the form that the dataset has them
    users: int  # Number of users in the batch, those without a row included
    max_new_tokens: int  # Width of the response part, in tokens
    num_generations: int = 1  # adjacent rows that answer the same prompt; a public number
    tool_mask: torch.Tensor | None = None  # 0 where a tool wrote the token, [rows, response]
    completions: list[list[dict[str, Any]]] | None = None
    asked: list[Any] | None = None  # prompts with an environment's first observation, [rows]
    extra: dict[str, list[Any]] = field(default_factory=dict)  # further values for rewards, [rows]
    failed: NDArray[np.bool_] | None = None  # its user contributes zero, [rows]
    sampled: NDArray[np.float64] | None = None  # vLLM's log-probabilities, [rows, response]
    left_out: NDArray[np.bool_] | None = None  # did not end, counts in no update, [rows]
    kept: Kept | None = None
    # The row at each place, −1 for none, [users, prompts, responses]; a private round has it from
    # the allocation and public numbers alone.
    grid: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if self.grid.ndim != 3:
            own, first, prompt = np.unique(self.prompt, return_index=True, return_inverse=True)
            prompts = in_grid(self.user[first], self.users)
            rows = in_grid(prompt, len(own))[prompts] if len(own) else prompts[..., None]
            grid = np.where(prompts[..., None] < 0, -1, rows)
            object.__setattr__(self, "grid", grid)

    @property
    def width(self) -> int:
        """The number of columns of the prompt part."""
        return self.tokens.shape[1] - self.max_new_tokens

    @property
    def response_mask(self) -> torch.Tensor:
        """1 where a response token is real, ``[rows, response]``."""
        return self.mask[:, -self.max_new_tokens :]

    @property
    def policy_mask(self) -> torch.Tensor:
        """1 where the policy itself sampled a response token, ``[rows, response]``."""
        # What a tool answered has no log-probability: no loss, ratio or length counts it.
        return self.response_mask if self.tool_mask is None else self.response_mask * self.tool_mask

    @property
    def turn(self) -> NDArray[np.int64]:
        """Number of the turn, from 0, in which the policy wrote a token, ``[rows, response]``."""
        # A turn is a stretch of the policy's own tokens; a tool's answer has the number before.
        own = self.policy_mask.numpy() != 0
        starts = own & ~np.pad(own, ((0, 0), (1, 0)))[:, :-1]
        turn: NDArray[np.int64] = np.maximum(starts.cumsum(1) - 1, 0)
        return turn

    @property
    def turns(self) -> list[int]:
        """Number of turns of each response, ``[rows]``."""
        return [int(last) + 1 for last in self.turn[:, -1]]

    def take(self, rows: NDArray[np.int64]) -> Responses:
        """Return these rows, in this order; users and prompts stay as they are."""

        def of(values: Any) -> Any:
            return [values[row] for row in rows] if isinstance(values, list) else values[rows]

        # Of each prompt the same number, in an order that is the same for all: places stay public.
        number = np.full(len(self.user) + 1, len(rows))  # the last one for places without a row
        number[rows] = np.arange(len(rows))
        grid = np.sort(number[self.grid], axis=2)
        each = int((grid < len(rows)).sum(2).max(initial=0))
        present = {name: getattr(self, name) for name in _OF_ROWS}
        chosen = {
            **{name: None if held is None else of(held) for name, held in present.items()},
            "extra": {name: of(values) for name, values in self.extra.items()},
            "kept": None if self.kept is None else self.kept.take(rows),
            "grid": np.where(grid < len(rows), grid, -1)[:, :, :each],
            "num_generations": min(self.num_generations, max(each, 1)),
        }
        return Responses(**{**vars(self), **chosen})

    def micro_batch(self, rows: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and mask of the rows at some places, ``[places, prompt + response]``."""
        # A place without a row has a filler: one token repeated after a prompt of one token.
        filler = torch.from_numpy(rows < 0)
        tokens, mask = self.tokens[rows], self.mask[rows]  # −1 is a row, too: it is written over
        tokens[filler], mask[filler] = 0, 0
        mask[filler, self.width - 1 :] = 1
        return tokens, mask

    def shared_rows(self, policy: CausalLMPolicy, rows: int | None = None) -> int:
        """Return how many of so many adjacent rows are best computed behind one prompt."""
        together = self.num_generations if rows is None else math.gcd(self.num_generations, rows)
        return policy.shared_rows(together, self.width, self.max_new_tokens)

    def replay(self, rows: NDArray[np.int64], shared_rows: int) -> Replay | None:
        """Return what sampling kept of a micro-batch; None where it kept nothing."""
        if self.kept is None:
            return None
        sizes = {"width": self.width, "length": self.max_new_tokens, "shared_rows": shared_rows}
        return Replay(self.kept, rows, **sizes)

    def policy_micro_batch(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return :attr:`policy_mask` of a micro-batch, ``[places, response]``; 0 in fillers."""
        own = self.response_mask[rows]
        if self.tool_mask is not None:
            own = own * self.tool_mask[rows]
        return own * torch.from_numpy(rows >= 0)[:, None]


_OF_ROWS = (
    "tokens", "mask", "prompt", "user", "from_base", "texts", "tool_mask", "completions", "asked",
    "failed", "sampled", "left_out",
)  # fmt: skip
"""The fields of :class:`Responses` with an entry for each row, or None."""

_WIDTH_STEP = 16


def prompt_width(prompts: Prompts, tokens: Sequence[Sequence[int]], longest: int) -> int:
    """Return the number of columns of the prompt part."""
    if prompts.round_users is not None:
        return longest
    widest = max(map(len, tokens), default=0)
    return min(-(-widest // _WIDTH_STEP) * _WIDTH_STEP, longest)


def token_rows(
    before: Sequence[Sequence[int]],
    behind: Sequence[Sequence[int]],
    *,
    width: int,
    length: int,
    padding: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and their mask, ``[rows, width + length]``; ``behind`` starts at ``width``."""
    tokens = torch.full((len(before), width + length), padding)
    mask = torch.zeros_like(tokens)
    for row, (prompt, response) in enumerate(zip(before, behind, strict=True)):
        columns = slice(width - len(prompt), width + len(response))
        tokens[row, columns] = torch.tensor([*prompt, *response])
        mask[row, columns] = 1
    return tokens, mask


def responses_of(
    prompts: Prompts,
    each: int,  # The number of responses to each prompt
    given: Sequence[Sequence[int]],  # The tokens of each row's prompt, [rows]
    written: Sequence[Sequence[int]],  # The tokens of each response, [rows]
    *,
    width: int,
    length: int,
    padding: int,
    **further: Any,  # fields of Responses
) -> Responses:
    """Return responses to prompts at the places of their users, by default without texts."""
    number, users = prompts.numbers
    grid = prompts.grid[..., None]
    tokens, mask = token_rows(given, written, width=width, length=length, padding=padding)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "mask": mask,
        "prompt": np.repeat(np.arange(len(prompts)), each),
        "user": np.repeat(number, each),
        "from_base": np.zeros(len(tokens), dtype=bool),
        "texts": [""] * len(tokens),
        "prompts": prompts,
        "users": users,
        "max_new_tokens": length,
        "grid": np.where(grid < 0, -1, each * grid + np.arange(each)),
    }
    return Responses(**{**fields, **further})


def in_batches(places: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Cut places into batches of a fixed size, and yield those that have more than fillers."""
    for start in range(0, len(places), size):
        batch = places[start : start + size]
        if (batch >= 0).any():
            yield np.pad(batch, (0, size - len(batch)), constant_values=-1)
