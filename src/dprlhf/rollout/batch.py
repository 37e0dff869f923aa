"""What sampling returns, and how its rows become micro-batches of fixed shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf.data.users import Prompts

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
        length: the length of the response part.
        longest: no prompt has more tokens than this public number.
        copies: so many adjacent rows each answer one prompt, token for token; a public number.
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
    longest: int
    copies: int = 1

    @property
    def response_mask(self) -> torch.Tensor:
        """1 where a response token is real, ``[rows, response]``."""
        return self.mask[:, -self.length :]

    @property
    def prompt_tokens(self) -> list[list[int]]:
        """The tokens of each prompt, without padding."""
        _, first = np.unique(self.prompt, return_index=True)
        tokens, mask = self.tokens[first, : -self.length], self.mask[first, : -self.length]
        return [t[m.bool()].tolist() for t, m in zip(tokens, mask, strict=True)]

    @property
    def widths(self) -> NDArray[np.int64]:
        """The width that each row's prompt is padded to, ``[rows]``; its own length decides."""
        lengths = self.mask[:, : -self.length].sum(1).numpy()
        widths: NDArray[np.int64] = padded_width(lengths, self.longest)
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


def padded_width(length: Any, longest: int) -> Any:
    """Round a prompt's length up to a multiple of 16, but not beyond the longest prompt."""
    return np.minimum(-(-length // _WIDTH_STEP) * _WIDTH_STEP, longest)
