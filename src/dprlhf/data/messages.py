"""The text of prompts and completions, which are texts or conversations (lists of messages)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(value: Any) -> str:
    """Return a text unchanged, or the texts of messages, joined by line breaks.

    The content of a message is a text, or a list of parts such as ``{"type": "text", "text": …}``.
    What has no text adds an empty line: a message that only calls a tool, a part with an image.

    Args:
        value: A text, a message, a part, a list of these, or None.

    >>> text_of([{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}])
    'Well?\\nYes.'
    >>> text_of({"role": "user", "content": [{"type": "text", "text": "Well?"}]})
    'Well?'
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return text_of(value.get("content") or value.get("text"))
    if isinstance(value, list | tuple):
        return "\n".join(map(text_of, value))
    return "" if value is None else str(value)


def last_text(completion: Any) -> str:
    """Return the text of a completion: itself, or that of the last of its messages.

    >>> last_text([{"role": "tool", "content": "3"}, {"role": "assistant", "content": "Three."}])
    'Three.'
    """
    return text_of(completion if isinstance(completion, str) else completion[-1:])
