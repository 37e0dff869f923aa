"""How a model writes its tool calls, as TRL knows it of common chat templates."""

from __future__ import annotations

import contextlib
from typing import Any

from trl.chat_template_utils import add_response_schema


def with_response_template(tokenizer: Any) -> None:
    """Give a tokenizer the response template of its chat template, where TRL knows one.

    One that has a template keeps it. For one that TRL does not know, calls are read as Qwen and
    Hermes models write them (:data:`dprlhf.agents.chat.PLAIN`).
    """
    if getattr(tokenizer, "response_template", None) is None:
        with contextlib.suppress(ValueError):
            add_response_schema(tokenizer)
