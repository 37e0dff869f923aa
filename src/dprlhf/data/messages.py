"""The text of prompts and completions, which are texts or conversations (lists of messages)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.recipe.policy import TOKENIZER_ARGUMENTS

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns whose values the chat template gets, as in TRL."""


def text_of(value: Any) -> str:
    """Return a text unchanged, or the texts of messages, joined by line breaks.

    The content of a message is a text, or a list of parts such as ``{"type": "text", "text": …}``.
    What has no text adds an empty line: a message that only calls a tool, a part with an image.

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


def template_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template that a row of data brings.

    >>> template_arguments({"tools": '[{"name": "add"}]', "chat_template_kwargs": {"think": False}})
    {'think': False, 'tools': [{'name': 'add'}]}
    """
    tools, own = (
        json.loads(value) if isinstance(value, str) else value
        for value in map(row.get, TEMPLATE_COLUMNS)
    )
    # A row may not bring a template: it is a program, and could hold up everybody's round.
    if not isinstance(own or {}, dict) or {*(own or {})} & {*TOKENIZER_ARGUMENTS, "chat_template"}:
        raise DprlhfError("chat_template_kwargs must map names of the template's own arguments")
    if not isinstance(tools or [], list) or not all(isinstance(t, dict) for t in tools or []):
        raise DprlhfError("tools must be a list of schemas")
    return {**(own or {}), **({"tools": tools} if tools else {})}
