"""Verifiable rewards: a completion is checked against the answer in the user's row.

Each has TRL's signature and is named in a recipe as
``function: dprlhf.rewards.verifiable:exact_match``. The right answer is the column ``answer`` of
the dataset; it is part of the user's row, so it is as private as the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1 for each completion that is the answer, else 0: exact match.

    White space around and between words, the case of letters and a full stop at the end do not
    count.

    Args:
        completions: Texts, or lists of messages, of which the last one's content counts.
        answer: The right answer to each prompt.
        **columns: Other columns of the dataset, which are not looked at.

    >>> exact_match([" Red.", "red or blue", [{"role": "assistant", "content": "Blue"}]],
    ...             answer=["red", "red", "blue"])
    [1.0, 0.0, 1.0]
    """
    return [
        float(_plain(text_of(completion)) == _plain(str(right)))
        for completion, right in zip(completions, answer, strict=True)
    ]


def text_of(completion: Any) -> str:
    """Return the text of a completion: itself, or the content of the last of its messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".").rstrip()
