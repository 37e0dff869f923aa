"""Users who try to act on a run: what their rows may hold, as the JSON text of each value."""

import json
import random
from typing import Any

CANARY = "zanzibar-7319"
"""A word that all of their longer texts have, and that may stand nowhere but in ``secret/``."""

_TEXTS = (
    "", " ", "\n", "\x00", "\ufeff", "\u2028", "\x85", "\x1b[2J", "\ud83d", "a\ud800b", "e\u0301",
    "\U0001f468\u200d\U0001f469", "\u202e", "\u200b", "\U000e0041", "a\rb", "a\r\nb", "#### 1e9999",
    "<eos>", "</s>", "<|im_end|>", "<tool_call>", '<tool_call>{"name": "add"}</tool_call>', "nan",
    "{{ messages }}", "{% for x in range(9) %}", "[INST]", "\\boxed{", '"', "''", "1,234", "null",
    "true", "[]", "[1, 2]", '[{"role": "user", "content": "x"}]', "../../etc/passwd", "=1+1", ",,,",
)  # fmt: skip
_NUMBERS = (
    "0", "-0.0", "1e308", "-1e308", "1e999", "NaN", "Infinity", "9007199254740993", str(2**63),
    str(-(2**70)), "7" * 400, "7" * 5000, "true", "false", "null", "0.1",
)  # fmt: skip
_ROLES = ("user", "assistant", "system", "tool", "", "CANARY", None, 7)


def text(rng: random.Random) -> str:
    """Return an odd text, short or as long as some hundred tokens."""
    chosen = "".join(rng.choices(_TEXTS, k=rng.randrange(1, 4)))
    return chosen + f" {CANARY} " * rng.choice((0, 0, 1, 1, 30))


def _written(value: Any) -> str:
    return json.dumps(value)


def _nested(rng: random.Random) -> str:
    depth = rng.choice((2, 63, 64, 65, 520, 5000))
    if rng.random() < 0.5:
        return "[" * depth + "]" * depth
    return '{"a": ' * depth + "1" + "}" * depth


def _message(rng: random.Random) -> str:
    content = rng.choice(
        (_written(text(rng)), value(rng), '[{"type": "text", "text": "a"}]', "null")
    )
    parts = {"role": _written(rng.choice(_ROLES)), "content": content}
    if rng.random() < 0.3:
        call = {"type": "function", "function": {"name": text(rng), "arguments": {"a": 1}}}
        parts["tool_calls"] = rng.choice((_written([call]), value(rng)))
    for key in rng.sample(("role", "content"), rng.choice((0, 0, 0, 1))):
        del parts[key]
    return "{" + ", ".join(f"{json.dumps(k)}: {v}" for k, v in parts.items()) + "}"


def conversation(rng: random.Random) -> str:
    """Return a list of messages, some of which no template reads."""
    return "[" + ", ".join(_message(rng) for _ in range(rng.randrange(4))) + "]"


def value(rng: random.Random) -> str:
    """Return any value as JSON."""
    kind = rng.choice(("text", "text", "number", "nested", "list", "mapping", "keys"))
    if kind == "text":
        return _written(text(rng))
    if kind == "number":
        return rng.choice(_NUMBERS)
    if kind == "nested":
        return _nested(rng)
    if kind == "list":
        return "[" + ", ".join(rng.choices(_NUMBERS, k=3)) + "]"
    count = 3 if kind == "mapping" else rng.choice((40, 2000))
    return _written({f"{CANARY} {i}": text(rng) for i in range(count)})


def prompt(rng: random.Random) -> str:
    """Return what may stand in place of a prompt or a completion."""
    kind = rng.choice((value, conversation, lambda own: _written(text(own))))
    return kind(rng)
