"""The commands about budget books: ``create``, ``enrol``, ``show``, ``history``, ``export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dprlhf.errors import DprlhfError

if TYPE_CHECKING:
    from dprlhf.budget import Book

budget = typer.Typer(
    help="Budget books: what each user has spent, over all runs. What they print is secret.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Name = Annotated[
    str | None,
    typer.Option(
        "--book",
        envvar="DPRLHF_BOOK",
        show_envvar=False,
        help="A SQLite file, or postgresql://HOST/DATABASE; without it, DPRLHF_BOOK.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@budget.command()
def create(
    dataset: Annotated[str, typer.Argument(help="Name of the data set, as in privacy.dataset.")],
    epsilon: Annotated[
        float, typer.Option(help="Largest ε of any of its users, over all runs together.")
    ],
    delta: Annotated[float, typer.Option(help="δ at which that ε is stated.")],
    user_column: Annotated[
        list[str] | None,
        typer.Option(
            help="The column that names the user; again for each owner of a row.",
            show_default="each row is a user",
        ),
    ] = None,
    adaptive: Annotated[
        bool,
        typer.Option(help="Let later plans depend on earlier results: the budget is a filter."),
    ] = False,
    book: Name = None,
) -> None:
    """Give a data set its budget for life; the first one makes the book and its key."""
    from dprlhf.budget import Book
    from dprlhf.recipe.data import unit_of

    unit = unit_of(user_column or [])
    made = Book.create(
        _named(book), dataset, epsilon=epsilon, delta=delta, unit=unit, adaptive=adaptive
    )
    typer.echo(
        f"book {made.id} ({made.storage.label}): data set {dataset}, epsilon {epsilon:g} at delta"
        f" {delta:g}"
    )
    if made.key_file is not None:
        typer.echo(f"its key: {made.key_file}; keep a copy of the key and of the book, both secret")


@budget.command()
def enrol(
    dataset: Annotated[str, typer.Argument(help="Name of the data set.")],
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe: its data and user column count.")],
    book: Name = None,
) -> None:
    """Make a data set's users known before its first run: its budget then holds everywhere."""
    from dprlhf.recipe import load_any_recipe
    from dprlhf.runs.budget import enrol as make_known

    made = make_known(load_any_recipe(recipe), _named(book), recipe.name, dataset)
    typer.echo(f"data set {made.dataset}: its users are known to book {made.book}")


@budget.command()
def show(book: Name = None, as_json: AsJson = False) -> None:
    """Show what is left: for each data set, the most that one of its users has spent.

    It is ε of the runs, for plans that were settled beforehand. Of a budget with --adaptive it is a
    share of the budget: with less than all of it used, the whole budget is what is guaranteed.
    """
    from dprlhf.privacy.gaussian import downwards, upwards

    state = _open(book).read()
    if as_json:
        names = ("book", "counter", "users", "datasets")
        typer.echo(json.dumps({name: state[name] for name in names}))
        return
    typer.echo(f"book {state['book']}, counter {state['counter']}, {state['users']:,} users\n")
    typer.echo(f"{'data set':<24}{'epsilon':>9}{'delta':>10}{'spent':>10}{'left*':>10}{'runs':>6}")
    for row in state["datasets"]:
        if row["spent"] is None:
            spent = f"{upwards(100 * row['used'], 3)}%"
            left = f"{downwards(max(0.0, 100 - 100 * row['used']), 3)}%"
        else:
            spent, left = upwards(row["spent"], 4), downwards(row["remaining"], 4)
        typer.echo(
            f"{row['name']:<24}{row['epsilon']:>9g}{row['delta']:>10g}"
            f"{spent:>10}{left:>10}{row['runs']:>6}"
        )
    typer.echo("* at least: runs together cost less than the sum of their epsilons")


@budget.command()
def history(
    dataset: Annotated[
        str | None, typer.Argument(help="Name of a data set.", show_default="all")
    ] = None,
    book: Name = None,
    as_json: AsJson = False,
) -> None:
    """List the reservations: run, date, mechanism, and the ε of each run alone."""
    from dprlhf.privacy.gaussian import upwards

    state = _open(book).read()
    names = [row["name"] for row in state["datasets"]]
    if dataset is not None and dataset not in names:
        raise DprlhfError(f"no data set {dataset!r} in this book; it has: {', '.join(names)}")
    rows = [row for row in state["reservations"] if dataset in (None, row["dataset"])]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        typer.echo(
            f"{row['number']:>4}  {row['date'][:16].replace('T', ' ')}  {row['dataset']:<16}"
            f"{row['stage']:<8}{row['name']:<24}epsilon {upwards(row['epsilon'], 4)}"
            f"{_repeated(row)}  {_mechanism(row['mechanism'])}"
        )


@budget.command()
def export(book: Name = None) -> None:
    """Print the whole book as JSON, without the hashes of its users."""
    typer.echo(json.dumps(_open(book).read(), indent=2))


def _named(book: str | None) -> str:
    if not book:
        raise DprlhfError("name the budget book with --book or DPRLHF_BOOK")
    return book


def _open(book: str | None) -> Book:
    from dprlhf.budget import Book

    return Book(_named(book))


def _repeated(row: dict[str, Any]) -> str:
    extra = [f"{row['times']} runs"] if row["times"] > 1 else []
    extra += ["an earlier run"] if row["earlier"] else []
    return f" ({', '.join(extra)})" if extra else ""


def _mechanism(terms: dict[str, Any] | None) -> str:
    if terms is None:
        return "users enrolled"
    text = f"{terms['partition']}, {terms['adjacency']}, T {terms['rounds']}"
    text += f", z {terms['noise_multiplier']:.4g}"
    for name, short in (("participations", "k"), ("releases_per_round", "J")):
        text += f", {short} {terms[name]}" if terms[name] > 1 else ""
    return text
