"""What sampling returns, and how its rows become micro-batches of fixed shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf.data.users import Prompts
from dprlhf.policies.kept import Kept, Replay

Tick = Callable[[int], None]
"""Called with the number of rows done since the last call."""


@dataclass(frozen=True, repr=False)
class Responses:
    """All responses of one round (or of an evaluation). A row is one response.

    Attributes:
        tokens: Prompt and response, ``[rows, prompt + response]``; prompts are padded on the left,
            responses on the right.
        mask: 1 where a token is real, ``[rows, prompt + response]``.
        prompt: Number of the prompt that a row answers, ``[rows]``; rows of a prompt are adjacent.
        user: Number of the user that a row belongs to within the batch, ``[rows]``.
        from_base: True where the row was sampled from μ, ``[rows]``.
        texts: The responses as text, ``[rows]``.
        prompts: The prompts in the form that the dataset has them.
        users: Number of users in the batch.
        max_new_tokens: Width of the response part, in tokens.
        max_prompt_tokens: Upper bound on a prompt's length in tokens, a public number.
        num_generations: Number of adjacent rows that answer the same prompt, token for token; a
            public number.
        tool_mask: 0 where a response token came from a tool or an environment, 1 where the policy
            wrote it (TRL's ``tool_mask``), ``[rows, response]``; None where the policy wrote all.
        completions: The responses as lists of messages, with the tools' answers among them; None
            for responses of one turn.
        asked: The prompts as the policy saw them, with the first observation of an environment,
            ``[rows]``; None where they are those of ``prompts``.
        extra: Further values for the rewards by name, ``[rows]`` each, such as the rows'
            ``environments``.
        failed: True where a trajectory broke off with an error, ``[rows]``; its user contributes
            zero. None where nothing can fail.
        left_out: True where a response counts in no update, because it did not end,
            ``[rows]``; None where all count.
        kept: What the model computed as it sampled the responses; None where nothing was kept.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    prompt: NDArray[np.int64]
    user: NDArray[np.int64]
    from_base: NDArray[np.bool_]
    texts: list[str]
    prompts: Prompts
    users: int
    max_new_tokens: int
    max_prompt_tokens: int
    num_generations: int = 1
    tool_mask: torch.Tensor | None = None
    completions: list[list[dict[str, Any]]] | None = None
    asked: list[Any] | None = None
    extra: dict[str, list[Any]] = field(default_factory=dict)
    failed: NDArray[np.bool_] | None = None
    left_out: NDArray[np.bool_] | None = None
    kept: Kept | None = None

    @property
    def response_mask(self) -> torch.Tensor:
        """1 where a response token is real, ``[rows, response]``."""
        return self.mask[:, -self.max_new_tokens :]

    @property
    def policy_mask(self) -> torch.Tensor:
        """1 where the policy itself sampled a response token, ``[rows, response]``.

        What a tool answered is context for the tokens behind it and has no log-probability of its
        own: no loss, ratio or length counts it.
        """
        return self.response_mask if self.tool_mask is None else self.response_mask * self.tool_mask

    @property
    def turn(self) -> NDArray[np.int64]:
        """Number of the turn, from 0, in which the policy wrote a token, ``[rows, response]``.

        A turn is a stretch of the policy's own tokens. What a tool answered has the number of the
        turn before it.
        """
        own = self.policy_mask.numpy() != 0
        starts = own & ~np.pad(own, ((0, 0), (1, 0)))[:, :-1]
        turn: NDArray[np.int64] = np.maximum(starts.cumsum(1) - 1, 0)
        return turn

    @property
    def turns(self) -> list[int]:
        """Number of turns of each response, ``[rows]``."""
        return [int(last) + 1 for last in self.turn[:, -1]]

    @property
    def prompt_tokens(self) -> list[list[int]]:
        """The tokens of each prompt, without padding."""
        _, first = np.unique(self.prompt, return_index=True)
        tokens, mask = (
            self.tokens[first, : -self.max_new_tokens],
            self.mask[first, : -self.max_new_tokens],
        )
        return [t[m.bool()].tolist() for t, m in zip(tokens, mask, strict=True)]

    @property
    def widths(self) -> NDArray[np.int64]:
        """Width that each row's prompt is padded to, ``[rows]``; its own length alone decides."""
        lengths = self.mask[:, : -self.max_new_tokens].sum(1).numpy()
        widths: NDArray[np.int64] = padded_width(lengths, self.max_prompt_tokens)
        return widths

    def take(self, rows: NDArray[np.int64]) -> Responses:
        """Return these rows, in this order; users, prompts and shapes stay as they are.

        ``num_generations`` is kept: the caller takes either all rows of a prompt or, of each
        prompt, the same number of adjacent ones.
        """
        messages = self.completions
        chosen = {
            "tokens": self.tokens[rows],
            "mask": self.mask[rows],
            "prompt": self.prompt[rows],
            "user": self.user[rows],
            "from_base": self.from_base[rows],
            "texts": [self.texts[row] for row in rows],
            "tool_mask": None if self.tool_mask is None else self.tool_mask[rows],
            "completions": None if messages is None else [messages[row] for row in rows],
            "asked": None if self.asked is None else [self.asked[row] for row in rows],
            "extra": {name: [values[row] for row in rows] for name, values in self.extra.items()},
            "failed": None if self.failed is None else self.failed[rows],
            "left_out": None if self.left_out is None else self.left_out[rows],
            "kept": None if self.kept is None else self.kept.take(rows),
        }
        return Responses(**{**vars(self), **chosen})

    def micro_batch(
        self, chosen: NDArray[np.int64], width: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and mask of some rows at a fixed shape, ``[size, width + response]``.

        Rows from ``len(chosen)`` on are fillers, which belong to no user: one token repeated after
        a prompt of one token.

        Args:
            chosen: Row numbers, at most ``size``.
            width: Width of the prompt part.
            size: Number of rows of the micro-batch.
        """
        missing = (width + self.max_new_tokens - self.tokens.shape[1], 0)
        filling = (0, 0, 0, size - len(chosen))
        # A negative pad cuts: the columns on the left are padding in all of these rows.
        tokens, mask = (F.pad(t[chosen], missing) for t in (self.tokens, self.mask))
        tokens, mask = F.pad(tokens, filling), F.pad(mask, filling)
        mask[len(chosen) :, width - 1 :] = 1
        return tokens, mask

    def replay(
        self, chosen: NDArray[np.int64], width: int, size: int, shared_rows: int
    ) -> Replay | None:
        """Return what sampling kept of a micro-batch; None where it kept nothing.

        Args:
            chosen: Row numbers, as for :meth:`micro_batch`.
            width: Width of the prompt part.
            size: Number of rows of the micro-batch.
            shared_rows: Number of rows that go behind one copy of their prompt.
        """
        if self.kept is None:
            return None
        return Replay(
            self.kept,
            chosen,
            height=size,
            width=width,
            length=self.max_new_tokens,
            shared_rows=shared_rows,
        )

    def policy_micro_batch(self, chosen: NDArray[np.int64], size: int) -> torch.Tensor:
        """Return :attr:`policy_mask` of a micro-batch, ``[size, response]``; 0 in fillers."""
        own = self.response_mask[chosen]
        if self.tool_mask is not None:
            own = own * self.tool_mask[chosen]
        return F.pad(own, (0, 0, 0, size - len(chosen)))


_WIDTH_STEP = 16


def padded_width(length: Any, max_prompt_tokens: int) -> Any:
    """Round a prompt's length up to a multiple of 16, but not beyond the longest prompt."""
    return np.minimum(-(-length // _WIDTH_STEP) * _WIDTH_STEP, max_prompt_tokens)
