"""The command ``dprlhf``: the list of its commands, and its error handling.

The functions behind the commands are in the files beside this one, by topic, each loaded when it is
named. They import torch and the other heavy libraries in their bodies, so that help and the
accounting commands start fast.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dprlhf.errors import REMOVED, DprlhfError, one_line

# Idle threads that spin starve each other when cores are busy: a training step on two busy cores
# was measured ten times slower. Read by the OpenMP runtime when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Libraries' deprecation warnings are for developers.
warnings.simplefilter("ignore", FutureWarning)


COMMANDS = {
    "Before a run": {
        "doctor": "prepare", "init": "prepare", "reward-check": "prepare", "assets": "prepare",
    },
    "Training": {
        "train": "train", "tune": "tune", "resume": "train", "sft": "train", "reward": "train",
        "dpo": "train", "feedback": "train",
    },
    "After a run": {
        "report": "folders", "comply": "folders", "generate": "folders", "merge": "folders",
        "push": "folders", "erase": "folders",
    },
    "Privacy": {"plan": "plan", "privacy": "privacy", "audit": "privacy", "budget": "budget"},
}  # fmt: skip
"""The commands by topic, each with the module beside this one that has it."""


class Commands(TyperGroup):
    """The commands, loaded by name; a wrong option value is one line, like other errors."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [name for section in COMMANDS.values() for name in section]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load a command; None if there is none of this name."""
        module = {n: m for section in COMMANDS.values() for n, m in section.items()}.get(cmd_name)
        if module is None:
            return None
        home = importlib.import_module(f"dprlhf.cli.{module}")
        made = getattr(home, cmd_name.replace("-", "_"))
        if not isinstance(made, typer.Typer):
            function, made = made, typer.Typer(add_completion=False, rich_markup_mode=None)
            settings = {"ignore_unknown_options": cmd_name == "train"}  # those of TRL
            made.command(cmd_name, context_settings=settings)(function)
        return typer.main.get_command(made)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by topic, each with the first sentence of its help."""
        for title, names in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.get_command(ctx, name).get_short_help_str(90)) for name in names]
                )

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        given = [*ctx._protected_args, *ctx.args]
        for name in (" ".join(given[:1]), " ".join(given[:2])):
            if instead := REMOVED.get(f"dprlhf {name}"):
                raise DprlhfError(f"{name} is gone: {instead}")
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            raise DprlhfError(one_line(error.format_message(), None)) from None
        except typer.Abort:
            if sys.stdin.isatty():
                raise
            asked = self.get_command(ctx, given[0]).params
            flags = [p.opts[0] for p in asked if getattr(p, "prompt", None)]
            missing = ", ".join(flag for flag in flags if flag not in given)
            raise DprlhfError(
                f"{given[0]} asks questions, and there is no terminal to answer them: give"
                f" {missing or 'its options'}"
            ) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    rich_markup_mode=None,  # loading what draws frames takes longer than all else
)


def _show_version(asked: bool) -> None:
    if asked:
        from dprlhf.runs.card import software_version

        typer.echo(f"dprlhf {software_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Fine-tune language models on private prompts, with a differential-privacy guarantee."""


def main() -> None:
    """Run a command; a known problem is one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack letters, such as ε
            stream.reconfigure(errors="replace")
    try:
        app(standalone_mode=True)
    except (DprlhfError, OSError) as error:  # the second of a file that is another account's, say
        print(f"dprlhf: {one_line(error, None)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
