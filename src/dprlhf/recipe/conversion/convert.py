"""The conversion of a whole file: which program wrote it, and what is left to the caller."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from dprlhf.errors import DprlhfError, nearest
from dprlhf.recipe.conversion import axolotl, llama_factory
from dprlhf.recipe.conversion.rules import UNREADABLE, Draft, Finding, apply, unreadable
from dprlhf.recipe.loading import AnyRecipe, read_settings, recipe_from

PROGRAMS: dict[str, ModuleType] = {"llama-factory": llama_factory, "axolotl": axolotl}
"""The programs whose files are read, each with the module of its tables."""


@dataclass(frozen=True)
class Converted:
    """A recipe made from another program's file.

    Attributes:
        program: The program that the file is for.
        findings: What became of each setting, in the file's order.
        left: The refused settings that the caller has yet to answer.
        recipe: The recipe, valid and complete; None while settings are left.
        text: The recipe as YAML: what the file and the caller say, without defaults.
    """

    program: str
    findings: list[Finding]
    left: list[Finding]
    recipe: AnyRecipe | None = None
    text: str = ""


def convert(
    path: str | Path,
    overrides: Sequence[str],
    *,
    epsilon: float,
    users: int | None = None,
    without: Collection[str] = (),
) -> Converted:
    """Make a recipe of a training file of LLaMA-Factory or axolotl.

    Args:
        path: The YAML file.
        overrides: Settings of the recipe, ``section.key=value``, which the file does not have.
        epsilon: The privacy budget ε.
        users: Number of users, from which the number of rounds follows.
        without: Names of settings in the file that are left out, because they are refused.

    Raises:
        DprlhfError: The file is of neither program, or its stage has no counterpart; or a value of
            the recipe is wrong or missing.
    """
    read = read_settings(Path(path))
    program = _program(read, path)
    tables = PROGRAMS[program]
    given = axolotl.flat(read) if tables is axolotl else read
    given = {str(name): value for name, value in given.items()}
    for name in without:
        if name not in given:
            raise DprlhfError(f"--without {name}: {path} has no such setting")
    given = {name: value for name, value in given.items() if name not in without}
    if users is not None and users < 1:
        raise DprlhfError(f"--users must be at least 1, not {users}")
    draft = Draft(tables.DEFAULTS | given, tables.stage_of(given), users)
    findings = _findings(tables, draft, set(given))
    ours = {override.partition("=")[0] for override in overrides}
    left = [f for f in findings if f.kind == "refused" and not _settled(f, ours)]
    if left:
        return Converted(program, findings, left)
    draft.put("privacy.epsilon", epsilon)
    recipe = recipe_from(draft.settings, overrides, source=str(path))
    text = yaml.safe_dump(draft.settings, sort_keys=False)
    return Converted(program, findings, [], recipe, text)


def _program(given: dict[str, Any], path: str | Path) -> str:
    if "base_model" in given:
        return "axolotl"
    if "model_name_or_path" in given:
        return "llama-factory"
    raise DprlhfError(
        f"{path}: neither a training file of LLaMA-Factory (model_name_or_path) nor of axolotl"
        " (base_model)"
    )


def _findings(tables: ModuleType, draft: Draft, named: set[str]) -> list[Finding]:
    unread = _unread(tables, draft)
    # First, as warm-up needs the rounds.
    together: dict[str, Finding] = tables.together(draft) | unread
    findings = []
    for name, value in draft.given.items():
        if name in together:
            finding = together[name]
        elif name in tables.FIELDS:
            finding = apply(tables.FIELDS[name], name, value, draft)
        else:
            near = nearest(name, [*tables.FIELDS, *together])
            hint = f"; did you mean {near!r}?" if near else ""
            finding = Finding(name, "refused", f"not known here{hint}")
        if name not in named:
            finding = Finding(
                name, finding.kind, f"{finding.about} (its default)", finding.settled_by
            )
        findings.append(finding)
    return findings


def _unread(tables: ModuleType, draft: Draft) -> dict[str, Finding]:
    """Read the settings that others build on; one that cannot be read is refused.

    Its default then stands for it, so that the other settings have their findings, too.
    """
    unread = {}
    for name, reader in tables.READ.items():
        value = draft.given.get(name)
        if value is None and name not in tables.DEFAULTS:  # as if it was left out
            continue
        try:
            draft.given[name] = reader(value)
        except UNREADABLE:
            unread[name] = unreadable(name, value)
            draft.given[name] = tables.DEFAULTS.get(name)
    return unread


def _settled(finding: Finding, ours: set[str]) -> bool:
    def given(key: str) -> bool:
        return any(our == key or our.startswith(f"{key}.") for our in ours)

    return bool(finding.settled_by) and all(map(given, finding.settled_by))
