"""Changes to the text of a recipe, with comments that say why; everything else stays as it is."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

_WIDTH = 98

Edit = tuple[int, int, str]
"""A replacement in a text: where it starts, where it ends, and what is put there."""


def changed_text(text: str, changes: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """Return the text of a recipe with other values for some keys.

    Args:
        text: The recipe, a YAML mapping.
        changes: New value by key, ``section.key``. A key that the text lacks is added to its
            section, a section that it lacks at the end.
        notes: Comment by key, which is written above the key's line.
    """
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("a recipe is a mapping of keys to values")
    edits: list[Edit] = []
    missing: dict[tuple[str, ...], tuple[dict[str, Any], list[str]]] = {}
    for key, value in changes.items():
        *parents, last = key.split(".")
        section, depth = _descend(root, parents)
        at = _entry(section, last) if depth == len(parents) else None
        note = notes.get(key, "")
        if at is not None:
            edits.append((at[1].start_mark.index, _end(at[1]), _flow(value)))
            edits.append(_comment(text, at[0].start_mark.index, note))
        elif depth == len(parents) and section.value:
            edits += _added(text, section, last, value, note)
        else:
            node, told = missing.setdefault(tuple(parents[: depth + 1]), ({}, []))
            for parent in parents[depth + 1 :]:
                node = node.setdefault(parent, {})
            node[last] = value
            told.append(note)
    for path, (values, told) in missing.items():
        section, _ = _descend(root, path[:-1])
        at = _entry(section, path[-1])
        about = "\n".join(filter(None, told))
        if at is not None:  # the section is there and empty
            start = at[1].start_mark.index
            space = "" if text[start - 1].isspace() else " "
            edits.append((start, max(start, _end(at[1])), space + _flow(values)))
            edits.append(_comment(text, at[0].start_mark.index, about))
        else:
            edits += _added(text, section, path[-1], values, about)
    for start, end, new in sorted(edits, key=lambda edit: edit[:2], reverse=True):
        text = text[:start] + new + text[end:]
    return text


def comment(note: str, indent: str = "") -> str:
    """Return a note as lines of a comment, each with its end of line."""
    lines: list[str] = []
    for paragraph in note.splitlines():
        lines += textwrap.wrap(paragraph, _WIDTH - len(indent)) or [""]
    return "".join(f"{indent}# {line}".rstrip() + "\n" for line in lines)


def _descend(node: yaml.MappingNode, path: Sequence[str]) -> tuple[yaml.MappingNode, int]:
    """Return the innermost section of a path that the text has, and its depth."""
    for depth, name in enumerate(path):
        at = _entry(node, name)
        if at is None or not isinstance(at[1], yaml.MappingNode):
            return node, depth
        node = at[1]
    return node, len(path)


def _entry(section: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    return next(((k, v) for k, v in section.value if k.value == name), None)


def _end(node: yaml.Node) -> int:
    """Return where a value ends; a block's mark is at the next token, past comments."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def _comment(text: str, at: int, note: str) -> Edit:
    line = text.rfind("\n", 0, at) + 1
    indent = text[line:at][: len(text[line:at]) - len(text[line:at].lstrip())]
    return line, line, comment(note, indent) if note else ""


def _added(text: str, section: yaml.MappingNode, key: str, value: Any, note: str) -> list[Edit]:
    """Return the edits that add a key at the end of a section that has others."""
    end = _end(section.value[-1][1])
    if section.flow_style:
        return [(end, end, f", {key}: {_flow(value)}"), _comment(text, end, note)]
    at = text.find("\n", end)
    at = len(text) if at < 0 else at
    indent = " " * section.value[0][0].start_mark.column
    about = comment(note, indent) if note else ""
    return [(at, at, f"\n{about}{indent}{key}: {_flow(value)}")]


def _flow(value: Any) -> str:
    """Return a value on one line of YAML, as it may stand in a flow mapping, too."""
    dumped: str = yaml.safe_dump([value], default_flow_style=True, width=10**6)
    return dumped.strip()[1:-1]
