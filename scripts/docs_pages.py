"""Write the reference's pages from the code: the recipe's keys, the commands, TRL's settings.

    python scripts/docs_pages.py

They go to ``docs/reference`` and are not kept in the repository; ``make docs`` writes them. mkdocs
calls the two hooks below (see mkdocs.yml).
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dprlhf import recipe
from dprlhf.recipe.refusals import models_in

RECIPES = {
    "Private updates: `dprlhf train`": recipe.Recipe,
    "Supervised fine-tuning: `dprlhf sft`": recipe.SFTRecipe,
    "Reward model: `dprlhf reward`": recipe.RewardRecipe,
    "Direct preference optimization: `dprlhf dpo`": recipe.DPORecipe,
    "Learning from logged feedback: `dprlhf feedback`": recipe.FeedbackRecipe,
}
INTRODUCTION = """# Recipes: every key

A recipe is YAML. This page is made from the classes that read it, so it is complete. Override any
key on the command line (`dprlhf train recipe.yaml privacy.epsilon=1`); a misspelt key is refused
with the nearest known one. [Flags named as in TRL](commands.md#flags-named-as-in-trl)
(`--model_name_or_path`, `--learning_rate`, …) work with `dprlhf train` too. Commented examples are
in the folder `recipes/`.

"""

TRL_INTRODUCTION = """# TRL's trainers: every setting, argument and log field

What [`PrivateGRPOConfig` and `PrivateRLOOConfig`](../trl.md) do with the settings of TRL 1.16's
`GRPOConfig` and `RLOOConfig`. This page is made from the table that the code uses: *honoured* means
the same here, *mapped* the nearest meaning that stays within one user, *no effect* takes any value,
*refused* takes the default only. The trainers' [arguments](#the-trainers-arguments) and the
[fields of their log](#fields-of-the-log) come last.

"""


def on_page_markdown(markdown: str, **others: Any) -> str:
    """Leave out links to files that the site does not have; mkdocs calls this."""
    return re.sub(
        r"\[([^\]]+)\]\((?:(?:\.\./)+(?:src|papers|recipes|scripts|tests|examples|Dockerfile)\b|(?:\.\./)*results/)[^)]*\)",
        r"\1",
        markdown,
    )


def on_page_content(html: str, **others: Any) -> str:
    """Write the docstrings' cross-references as plain names; mkdocs calls this."""
    return re.sub(r":\w+:<code>~?[\w.]*?(\w+)</code>", r"<code>\1</code>", html)


def pages() -> dict[Path, str]:
    """Return the text of each page by its file."""
    folder = Path(__file__).resolve().parents[1] / "docs" / "reference"
    return {
        folder / "recipes.md": recipes_page().rstrip() + "\n",
        folder / "commands.md": commands_page().rstrip() + "\n",
        folder / "trl.md": trl_page().rstrip() + "\n",
    }


def recipes_page() -> str:
    parts, seen = [INTRODUCTION], set[type]()
    for title, kind in RECIPES.items():
        parts.append(f"## {title}\n\n" + section("", kind, seen))
    return "".join(parts)


def section(prefix: str, kind: type[BaseModel], seen: set[type]) -> str:
    """Return the table of one section, then those of the sections inside it."""
    about = attributes(kind)
    rows, inner = [], []
    for name, field in kind.model_fields.items():
        models = list(models_in(field.annotation))
        default = field.get_default(call_default_factory=True)
        if field.is_required():
            shown = "required"
        elif isinstance(default, BaseModel):
            shown = "see below"
        else:
            shown = f"`{spelt(default)}`"
        meaning = about.get(name, "").replace("|", "\\|") + mark(field.metadata)
        rows.append(f"| `{prefix}{name}` | {type_name(field.annotation)} | {shown} | {meaning} |")
        inner += [(f"{prefix}{name}", model, len(models) > 1) for model in models]
    text = f"{summary(kind)}\n\n| key | type | default | |\n|---|---|---|---|\n"
    text += "\n".join(rows) + "\n\n"
    for path, model, one_of_several in inner:
        if model in seen:
            text += f"`{path}` takes the keys of {model.__name__}, above.\n\n"
            continue
        seen.add(model)
        name = f": {model.__name__}" if one_of_several else ""
        text += f"### `{path}`{name}\n\n" + section(f"{path}.", model, seen)
    return text


def mark(metadata: list[Any]) -> str:
    """Return what of a key is experimental, for the end of its description."""
    kinds = [kind for kind in metadata if isinstance(kind, recipe.Experimental)]
    values = "".join(f", `{value}`" for kind in kinds for value in kind.values)
    return f" (**experimental**{values})" if kinds else ""


def type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(type_name(a) for a in arguments))
    if origin in (list, tuple):
        return f"list of {type_name(arguments[0])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), getattr(annotation, "__name__", str(annotation))
    )


def spelt(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple | list) else str(value)


def summary(kind: type) -> str:
    return plain(re.split(r"\n\s*Attributes:", inspect.getdoc(kind) or "")[0])


def attributes(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say about each attribute."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, listed = (inspect.getdoc(base) or "").partition("Attributes:\n")
        for match in re.finditer(r"^    (\w+): ((?:.|\n(?!    \w+: ))*)", listed, re.MULTILINE):
            found[match[1]] = plain(match[2])
    return found


def plain(text: str) -> str:
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text.replace("``", "`"))
    return " ".join(text.split())


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return what a Literal, or a Literal or None, allows."""
    kinds = (annotation, *typing.get_args(annotation))
    return next((typing.get_args(k) for k in kinds if typing.get_origin(k) is Literal), ())


def commands_page() -> str:
    """Return the help of every command."""
    import typer

    from dprlhf.cli.app import app

    lines = ["# Commands\n"]

    def describe(command: Any, name: str) -> None:
        lines.append(f"\n## `{name}`\n\n{plain((command.help or '').strip())}\n")
        rows = []
        hints = typing.get_type_hints(command.callback) if command.callback else {}
        for parameter in command.params:
            flags = ", ".join(f"`{o}`" for o in parameter.opts if o.startswith("-"))
            label = flags or f"`{parameter.name.upper()}`"
            if parameter.name not in ("help", "install_completion", "show_completion"):
                about = plain(getattr(parameter, "help", None) or "")
                allowed = ", ".join(f"`{choice}`" for choice in choices_of(hints[parameter.name]))
                rows.append(f"| {label} | {about}{allowed and f' ({allowed})'} |")
        if rows:
            lines.append("\n| | |\n|---|---|\n" + "\n".join(rows) + "\n")
        for sub in sorted(command.list_commands(None) if hasattr(command, "commands") else ()):
            describe(command.get_command(None, sub), f"{name} {sub}")

    describe(typer.main.get_command(app), "dprlhf")
    return "".join(lines) + flags_table()


def trl_page() -> str:
    """Return the table of every setting of TRL's configs."""
    from dprlhf.trl.fields import ARGUMENTS, GRPO, KTO, LOG, RLOO, Field

    def table(fields: dict[str, Field], what: str = "setting") -> str:
        rows = "".join(
            f"| `{name}` | {field.kind} | {field.note.replace('|', chr(92) + '|')} |\n"
            for name, field in sorted(fields.items())
        )
        return f"| {what} | | |\n|---|---|---|\n{rows}"

    both = {name: field for name, field in GRPO.items() if RLOO.get(name) == field}
    alone = {"`GRPOConfig` alone": GRPO, "`RLOOConfig` alone": RLOO, "`KTOConfig`": KTO}
    text = TRL_INTRODUCTION + "## Both configs\n\n" + table(both)
    for title, fields in alone.items():
        own = {name: field for name, field in fields.items() if name not in both}
        text += f"\n## {title}\n\n" + table(own)
    text += "\n## The trainers' arguments\n\n" + table(ARGUMENTS, "argument")
    return text + "\n## Fields of the log\n\n" + table(LOG, "field")


def refused_table() -> str:
    """Return the last table of ``docs/trl.md``: what is refused of TRL, and why."""
    from dprlhf.trl.fields import ARGUMENTS, GRPO, KTO, RLOO

    names: dict[str, list[str]] = {}
    for name, field in sorted({**KTO, **GRPO, **RLOO, **ARGUMENTS}.items()):
        if field.kind == "refused":
            names.setdefault(field.note, []).append(f"`{name}`")
    rows = [(", ".join(several), note) for note, several in names.items()]
    models = ARGUMENTS["model"].note.partition("Refused are ")[2].partition(". ")[0]
    table = "".join(f"| {what} | {why} |\n" for what, why in [*rows, ("some models", models)])
    return f"| refused | why, and what to do instead |\n|---|---|\n{table}"


def flags_table() -> str:
    """Return which of TRL's flags `dprlhf train` takes, and what stands for others."""
    from dprlhf.recipe.trl_names import COMBINED, INSTEAD, KEYS

    both = KEYS | COMBINED
    taken = "".join(f"| `--{name}` | `{key}` |\n" for name, key in both.items())
    others = "".join(f"| `--{name}` | {text} |\n" for name, text in INSTEAD.items())
    return (
        "\n## Flags named as in TRL\n\n`dprlhf train` takes these names of TRL's GRPOConfig,"
        " ModelConfig and ScriptArguments, with hyphens or underscores, as `--name value` or"
        " `--name=value`, and `dprlhf.train` takes them as arguments:\n\n"
        "| flag | key of the recipe |\n|---|---|\n"
        + taken
        + "\nThese of TRL's names it refuses, and says what to do instead:\n\n"
        "| flag | instead |\n|---|---|\n" + others
    )


if __name__ == "__main__":
    for file, text in pages().items():
        file.write_text(text)
