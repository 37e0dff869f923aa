"""The command ``dprlhf``: the list of its commands, and its error handling.

The functions behind the commands are in the files beside this one, by topic. They import torch and
the other heavy libraries in their bodies, so that help and the accounting commands start fast.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dprlhf.cli import bench, budget, folders, plan, prepare, privacy, train, tune
from dprlhf.errors import REMOVED, DprlhfError, one_line

# Idle threads that spin starve each other when cores are busy: a training step on two busy cores
# was measured ten times slower. Read by the OpenMP runtime when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Libraries' deprecation warnings are for developers.
warnings.simplefilter("ignore", FutureWarning)


class OneLineErrors(TyperGroup):
    """A group of commands that reports a wrong option value in one line, like other errors."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name.

        Raises:
            DprlhfError: Earlier versions had it; the message names what takes its place.
        """
        if instead := REMOVED.get(f"dprlhf {cmd_name}"):
            raise DprlhfError(f"{cmd_name} is gone: {instead}")
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        """Run a command.

        Raises:
            DprlhfError: A value is missing or wrong; the message names the option.
        """
        given = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            raise DprlhfError(one_line(error.format_message(), None)) from None
        except typer.Abort:
            if sys.stdin.isatty():
                raise
            asked = [p for p in self.commands[given[0]].params if getattr(p, "prompt", None)]
            flags = [p.opts[0] for p in asked if p.opts[0] not in given]
            raise DprlhfError(
                f"{given[0]} asks questions, and there is no terminal to answer them: give"
                f" {', '.join(flags) or 'its options'}"
            ) from None


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
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


_PREPARE, _TRAIN = "Before a run", "Training"
_FOLDERS, _PRIVACY, _PAPERS = "After a run", "Privacy", "Papers"

app.command(rich_help_panel=_PREPARE)(prepare.doctor)
app.command(rich_help_panel=_PREPARE)(prepare.init)
app.command("reward-check", rich_help_panel=_PREPARE)(prepare.reward_check)
app.add_typer(prepare.assets, name="assets", rich_help_panel=_PREPARE)
app.command(
    rich_help_panel=_TRAIN, context_settings={"ignore_unknown_options": True}
)(train.train)  # fmt: skip
app.command(rich_help_panel=_TRAIN)(tune.tune)
app.command(rich_help_panel=_TRAIN)(train.resume)
app.command(rich_help_panel=_TRAIN)(train.sft)
app.command(rich_help_panel=_TRAIN)(train.reward)
app.command(rich_help_panel=_TRAIN)(train.dpo)
app.command(rich_help_panel=_FOLDERS)(folders.report)
app.command(rich_help_panel=_FOLDERS)(folders.comply)
app.command(rich_help_panel=_FOLDERS)(folders.generate)
app.command(rich_help_panel=_FOLDERS)(folders.merge)
app.command(rich_help_panel=_FOLDERS)(folders.push)
app.command(rich_help_panel=_PRIVACY)(plan.plan)
app.add_typer(privacy.accounting, name="privacy", rich_help_panel=_PRIVACY)
app.command(rich_help_panel=_PRIVACY)(privacy.audit)
app.add_typer(budget.budget, name="budget", rich_help_panel=_PRIVACY)
app.add_typer(bench.bench, name="bench", rich_help_panel=_PAPERS)


def main() -> None:
    """Run a command; a known problem is one line on stderr and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack letters, such as ε
            stream.reconfigure(errors="replace")
    try:
        app(standalone_mode=True)
    except DprlhfError as error:
        print(f"dprlhf: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
