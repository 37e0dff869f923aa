"""The commands before a run: ``doctor``, ``init``, ``reward-check`` and ``assets``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dprlhf.cli.answers import (
    check_epsilon,
    check_model,
    check_prompts,
    check_public_prompts,
    check_reward,
    check_user_column,
    checked,
    column_in,
    columns_in,
    names_in,
    take_stage,
    users_in,
)
from dprlhf.errors import DprlhfError

PublicPrompts = Annotated[
    str,
    typer.Option(
        prompt="Public prompts for the evaluation (empty: none)",
        callback=checked(check_public_prompts),
    ),
]
PromptColumn = Annotated[
    str | None,
    typer.Option(
        help="Column of the prompts; without it prompt, else messages.",
        is_eager=True,  # the checks of the answers ask for it
    ),
]

StageName = Annotated[
    str,
    typer.Option(
        help="What the recipe is for: rl (dprlhf train), sft, reward, dpo or feedback.",
        callback=take_stage,
        is_eager=True,  # it decides which questions are asked
    ),
]

assets = typer.Typer(
    help="Models and data of the demo.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def doctor() -> None:
    """Show what this machine has: versions, devices, disk, hub and assets. Exit status 1: a gap."""
    from dprlhf.cli.doctor import examine

    findings = examine()
    for finding in findings:
        mark = "ok" if finding.good else "BAD"
        typer.echo(f"{mark:<4}{finding.name:<26}{finding.value}")
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


def init(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(prompt="Model (hub id or folder)", callback=checked(check_model)),
    ],
    prompts: Annotated[
        str,
        typer.Option(
            prompt="Private prompts (file, folder or hub id)", callback=checked(check_prompts)
        ),
    ],
    user_column: Annotated[
        str,
        typer.Option(
            prompt="Column that names the user (several: a,b; empty: every row is a user)",
            callback=checked(check_user_column),
        ),
    ] = "",
    reward: Annotated[
        str,
        typer.Option(
            prompt="Reward (file.py:function, or a classifier)", callback=checked(check_reward)
        ),
    ] = "my_rewards.py:reward",
    public_prompts: PublicPrompts = "",
    epsilon: Annotated[
        str, typer.Option(prompt="Privacy budget epsilon", callback=checked(check_epsilon))
    ] = "4",
    out: Annotated[Path, typer.Option(help="The recipe to write; it must not exist yet.")] = Path(
        "recipe.yaml"
    ),
    prompt_column: PromptColumn = None,
    stage: StageName = "rl",
) -> None:
    """Ask six questions and write a short recipe. An option answers its question."""
    from dprlhf.cli.init import new_recipe
    from dprlhf.data.columns import person_column
    from dprlhf.runs.folder import write_atomically

    if out.exists():
        raise DprlhfError(f"{out}: exists; name another file with --out")
    if not user_column and (name := person_column(names_in(prompts))):
        source = context.get_parameter_source("user_column")
        if source is not None and source.name == "PROMPT":
            question = f"The column {name!r} looks like the name of a user. Is it?"
            user_column = name if typer.confirm(question, default=True) else ""
        else:
            hint = f"column {name!r} looks like the name of a user: if so, set data.user_column"
            typer.echo(hint, err=True)
    columns = columns_in(prompts, prompt_column, stage)
    column = str(columns["prompt_column"])
    column_in(public_prompts, column, "public prompts")  # where it is read by the same name
    text = new_recipe(
        stage=stage,
        model=model,
        prompts=prompts,
        user_column=user_column,
        reward=reward,
        public_prompts=public_prompts,
        epsilon=float(epsilon),
        users=users_in(prompts, user_column, column),
        public=users_in(public_prompts, "", column),
        columns=columns,
    )
    write_atomically(out, text)
    command = "train" if stage == "rl" else stage
    typer.echo(f"{out}; look at it, then: dprlhf {command} {out} --dry-run")


def reward_check(
    function: Annotated[
        str, typer.Argument(help="The reward: package.module:function, or file.py:function.")
    ],
    prompts: Annotated[Path, typer.Option(help="A file of PUBLIC prompts.")],
    prompt_column: Annotated[str, typer.Option(help="Column of the prompts.")] = "prompt",
    completion_column: Annotated[
        str,
        typer.Option(help="Column of completions to score; stand-ins are scored without it."),
    ] = "completion",
    reward_range: Annotated[
        float, typer.Option(help="R: scores are clipped to [−R, R] in training.")
    ] = 3.0,
    limit: Annotated[int, typer.Option(min=1, help="Number of rows to use.")] = 64,
) -> None:
    """Check on public prompts that a reward scores each completion by itself, and how it scores."""
    from dprlhf.cli.reward_check import explain
    from dprlhf.cli.reward_check import reward_check as check

    checks, stand_ins = check(
        function,
        prompts,
        prompt_column=prompt_column,
        completion_column=completion_column,
        reward_range=reward_range,
        limit=limit,
    )
    typer.echo(explain(checks, reward_range))
    if stand_ins:
        typer.echo(
            f"There is no column '{completion_column}': stand-in texts were scored, so range and"
            " histogram are not those of real responses."
        )


@assets.command("pull")
def assets_pull(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of assets.", show_default="all of them")
    ] = None,
) -> None:
    """Fetch the demo's models and data, and build what is made from them, once."""
    from dprlhf.assets import pull

    for name, path in pull(names).items():
        typer.echo(f"{name}: {path}")


@assets.command("list")
def assets_list() -> None:
    """List the assets, and whether they are ready."""
    from dprlhf.assets import status

    states = status()
    wide = max(len(asset.name) for asset in states) + 2
    for asset in states:
        typer.echo(f"{asset.name:<{wide}}{'ready' if asset.ready else 'missing':<9}{asset.about}")
