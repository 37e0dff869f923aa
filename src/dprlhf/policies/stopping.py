"""Stop strings: a response ends where its own text has one, as in transformers' ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dprlhf.errors import DprlhfError, one_line


class StopStrings:
    """Says which responses have just completed a stop string.

    The matching is transformers' ``StopStringCriteria``, on the tokens of the responses alone: a
    string that starts in the prompt stops nothing.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        from transformers import StopStringCriteria

        self.strings = tuple(strings)
        try:
            self._criteria: Any = StopStringCriteria(tokenizer, list(strings))
        except (ValueError, AttributeError, TypeError) as error:
            raise DprlhfError(f"rollout.stop {list(strings)}: {one_line(error)}") from error
        self.reach = int(self._criteria.maximum_token_len)

    def completed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return whether the last token completes a stop string, ``[rows]``."""
        stopped: torch.Tensor = self._criteria(tokens, None)
        return stopped
