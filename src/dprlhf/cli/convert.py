"""``dprlhf convert``: a recipe from a training file of LLaMA-Factory or axolotl."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dprlhf.errors import DprlhfError

if TYPE_CHECKING:
    from dprlhf.recipe import AnyRecipe


def convert(
    file: Annotated[
        Path, typer.Argument(help="A YAML training file of LLaMA-Factory or of axolotl.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of the recipe, section.key=value.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="ε, the privacy budget; the file has none.")] = ...,  # type: ignore[assignment]
    users: Annotated[
        int | None, typer.Option(help="N, the number of users: epochs become rounds by it.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="A setting of the file to leave out; repeat it.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The new recipe.", show_default="standard output"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what became of each setting as JSON.")
    ] = False,
) -> None:
    """Turn a training file of LLaMA-Factory or axolotl into a recipe.

    Every setting is mapped, has no effect, or is refused with the reason; standard error says
    which. Nothing is written while a refused setting is left.
    """
    from dprlhf.recipe.conversion import convert as converted
    from dprlhf.runs.folder import write_atomically

    if out is not None and out.exists():
        raise DprlhfError(f"{out}: exists; name a new file")
    made = converted(file, overrides or (), epsilon=epsilon, users=users, without=without or ())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in made.findings]))
    else:
        width = max((len(finding.name) for finding in made.findings), default=0)
        for finding in made.findings:
            answered = finding.kind == "refused" and finding not in made.left
            kind = "answered" if answered else finding.kind
            typer.echo(f"{finding.name:<{width}}  {kind:<9}  {finding.about}", err=True)
    if made.left:
        names = ", ".join(finding.name for finding in made.left)
        raise DprlhfError(
            f"{file} ({made.program}): no counterpart for {names}: answer them with section.key="
            "value as said above, change the file, or leave them out with --without NAME"
        )
    text = f"# From {file.name} of {made.program}, by dprlhf convert. Look before you run:\n"
    text += f"# dprlhf {_command(made.recipe)} THIS.yaml --dry-run\n{made.text}"
    if out is not None:
        write_atomically(out, text)
    elif not as_json:
        typer.echo(text, nl=False)


def _command(recipe: AnyRecipe | None) -> str:
    return "train" if recipe is None or recipe.stage == "rl" else recipe.stage
