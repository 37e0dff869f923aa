"""The report of one or several runs: one HTML file, from a run's published files.

Nothing is read from ``secret/``, and no time stamps: the duration of a private round reveals its
number of users. A file that is missing, damaged or of another shape is named at the top
(:attr:`PublishedRun.problems`); the rest is still shown.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dprlhf.errors import DprlhfError, extra
from dprlhf.privacy.gaussian import downwards, upwards
from dprlhf.privacy.ledger import charged_rounds
from dprlhf.recipe import load_any_recipe
from dprlhf.recipe.sections import measure_label
from dprlhf.runs.card import guarantee_sentence, in_plain_words
from dprlhf.runs.earlier import total_of_runs
from dprlhf.runs.folder import RunFolder, write_atomically

T = TypeVar("T")

_ABSURD = 1e100
"""A larger number is treated as damaged, because it could not be drawn."""

_OF_ANOTHER_SHAPE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What reading a file raises that is no JSON, or holds other things than a run writes."""


@dataclass
class PublishedRun:
    """The published files of a run folder, as far as they can be read.

    Attributes:
        name: Name of the run's folder.
        model: The model that was trained, as the recipe names it.
        card: Content of ``privacy.json``; empty where it cannot be read.
        recipe: Text of ``recipe.yaml``.
        metrics: Readable lines of ``metrics.jsonl``, in the order of rounds.
        samples: Content of ``samples.json``: public prompts with continuations.
        timing: Duration of each phase in seconds per response, measured on public prompts.
        public_losses: Names of a supervised stage's metrics on public rows; empty for private
            updates.
        evaluation: Public measures before and after: a supervised stage's loss (and accuracy), or
            the reward and the measures of the responses.
        win_rates: Win rate against the base model with its 95% interval, by reward.
        value: Value of each policy by the logs, with both ends of its 95% interval.
        charged: The rounds that the ledger has charged.
        problems: Sentences that say what is missing, damaged or without privacy.
    """

    name: str
    model: str = ""
    card: dict[str, Any] = field(default_factory=dict)
    recipe: str = ""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)
    public_losses: tuple[str, ...] = ()
    evaluation: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    win_rates: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    value: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    charged: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """The planned number of rounds T, or the last round charged where that is larger."""
        planned = finite_number(self.card.get("rounds"))
        return max([int(planned or 0), *self.charged])

    @property
    def guarantee(self) -> str:
        """The guarantee in one sentence."""
        try:
            return guarantee_sentence(self.card)
        except _OF_ANOTHER_SHAPE:
            return "Unknown: privacy.json is missing or damaged."

    @property
    def in_plain_words(self) -> str:
        """What the guarantee leaves to a guess about one user."""
        try:
            return in_plain_words(self.card)
        except _OF_ANOTHER_SHAPE:
            return "nothing can be said."

    @property
    def title(self) -> str:
        """The model, the data and the day on which the run began."""
        known = (self.model, self.card.get("dataset"), self.card.get("date"))
        return ", ".join(str(part) for part in known if part) or self.name

    @property
    def before(self) -> tuple[float, float] | None:
        """Mean reward of the base model on the public prompts, and its standard error."""
        return _mean(self._rewards("before"))

    @property
    def after(self) -> tuple[float, float] | None:
        """Mean reward of the tuned policy on the public prompts, and its standard error."""
        return _mean(self._rewards("after"))

    @property
    def rise(self) -> tuple[float, float] | None:
        """The mean difference on the same prompts and draws, and its standard error."""
        pairs = zip(self._rewards("before"), self._rewards("after"), strict=True)
        return _mean([b - a for a, b in pairs if a is not None and b is not None])

    def _rewards(self, when: str) -> list[float | None]:
        return [finite_number(sample.get(f"reward_{when}")) for sample in self.samples]


def read_run(path: Path) -> PublishedRun:
    """Read a run folder's published files; an unreadable one becomes an entry in ``problems``.

    Raises:
        DprlhfError: The folder has none of a run's files.
    """
    folder = RunFolder(path)
    files = [folder.recipe, folder.privacy, folder.ledger, folder.metrics, folder.samples]
    if not any(file.is_file() for file in files):
        folder.require()  # raises: the recipe is missing, too
    run = PublishedRun(path.resolve().name)
    # A recipe that is cut off is often still YAML: it is loaded, too.
    read = _attempt(run, folder.recipe, lambda f: (f.read_text("utf-8"), load_any_recipe(f)), None)
    if read is not None:
        run.recipe, recipe = read
        run.public_losses, run.model = recipe.public_losses, recipe.policy.model_name_or_path
    run.card = _attempt(run, folder.privacy, _json_of(dict), {})
    run.charged = _attempt(run, folder.ledger, charged_rounds, [])
    run.metrics = _metrics(run, folder.metrics)
    finished = folder.samples.is_file() or (folder.policy / "README.md").is_file()
    if folder.samples.is_file():
        run.samples = _attempt(run, folder.samples, _json_of(list), [])
        run.samples = [s for s in run.samples if isinstance(s, dict)]
    if folder.timing.is_file():
        timing: dict[str, Any] = _attempt(run, folder.timing, _json_of(dict), {})
        run.timing = {k: v for k, v in timing.items() if finite_number(v) is not None and v >= 0}
    if folder.evaluation.is_file():
        nothing: _Measured = ({}, {}, {})
        measured = _attempt(run, folder.evaluation, _evaluation, nothing)
        run.evaluation, run.win_rates, run.value = measured
    if run.card and not run.card.get("private"):
        run.problems.insert(0, "No privacy: this run added no noise. It is for comparison only.")
    if not finished:
        run.problems.append(
            f"Half-finished: {len(run.metrics)} of {run.rounds or 'an unknown number of'} rounds"
            " are done. Continue it with dprlhf resume."
        )
    lost = sorted(set(run.charged) - {m["round"] for m in run.metrics})
    if finished and lost:
        run.problems.append(
            f"Charged without a line in metrics.jsonl: round {', '.join(map(str, lost))}. The"
            " users of these rounds are spent."
        )
    return run


def _attempt(run: PublishedRun, file: Path, read: Callable[[Path], T], otherwise: T) -> T:
    try:
        return read(file)
    except FileNotFoundError:
        run.problems.append(f"{file.name} is missing.")
    except (OSError, DprlhfError, *_OF_ANOTHER_SHAPE):
        spent = " What was spent is not certain." if file.name == "ledger.jsonl" else ""
        run.problems.append(f"{file.name} is damaged, altered or cut off.{spent}")
    return otherwise


def _json_of(kind: type[T]) -> Callable[[Path], T]:
    def read(file: Path) -> T:
        value = json.loads(file.read_text("utf-8"))
        if not isinstance(value, kind):
            raise ValueError
        return value

    return read


_Measured = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def _evaluation(file: Path) -> _Measured:
    """Return the measures before and after, the win rates, and the values by the logs."""
    held = _json_of(dict)(file)
    measures = {
        when: {
            name: (float(one["mean"]), _or_nan(one["standard_error"]))
            for name, one in held[when].items()
            if one["mean"] is not None
        }
        for when in ("before", "after")
        if when in held
    }
    rates = {name: one["win_rate"] for name, one in held.get("compared", {}).items()}
    won = {
        name: (float(rate["rate"]), float(rate["low"]), float(rate["high"]))
        for name, rate in rates.items()
        if rate["rate"] is not None
    }
    values = {
        name: (_or_nan(value["mean"]), float(value["low"]), float(value["high"]))
        for name, value in held.get("value", {}).items()
    }
    return measures, won, values


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)


def _metrics(run: PublishedRun, file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        run.problems.append("metrics.jsonl is missing: no round has finished.")
        return []
    rounds: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in file.read_bytes().splitlines():
        try:
            values = json.loads(line)
            t = int(values["round"])
            if finite_number(t) is None:
                raise ValueError
            rounds[t] = {**values, "round": t}
        except _OF_ANOTHER_SHAPE:
            damaged += 1
    if damaged:
        run.problems.append(f"metrics.jsonl is damaged: {damaged} of its lines cannot be read.")
    return [rounds[t] for t in sorted(rounds)]


def finite_number(value: Any) -> float | None:
    """Return a value of a file as a float; None if it is no number or too large to draw."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and abs(value) < _ABSURD else None


def _mean(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return None
    return statistics.fmean(known), statistics.stdev(known) / math.sqrt(len(known))


_Z95 = 1.96
"""Half-width of a 95% confidence band, in standard errors."""
_SHOWN_SAMPLES = 8
_FIRST = 3
"""Figures of a run that are shown without being asked for."""


def write_report(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of one or several runs as one HTML file, and return its path.

    Args:
        folders: Run folders; with several, the report starts with a comparison.
        out: The HTML file; None takes ``report.html`` in the only run's folder, or for several runs
            in the current folder.

    Raises:
        DprlhfError: A folder is no run folder, or the file cannot be written.
    """
    runs = [read_run(Path(folder)) for folder in folders]
    if out is None:
        out = Path(folders[0], "report.html") if len(folders) == 1 else Path("report.html")
    html = render(runs, _together(folders) if len(runs) > 1 else "")
    # Continuations may hold halves of surrogate pairs, which UTF-8 cannot write.
    write_atomically(Path(out), html.encode("utf-8", "replace"))
    return Path(out)


def render(runs: Sequence[PublishedRun], together: str = "") -> str:
    """Return the report as self-contained HTML, which loads no other file.

    Args:
        runs: The runs; with several, the report starts with a comparison.
        together: What is stated for users who are in several of them.
    """
    compared = [s for run in runs if (s := Series(run.name, _public_reward(run))).points]
    comparison = Figure("Reward on public prompts", "", "reward", compared)
    html: str = _template().render(
        runs=runs,
        first=_FIRST,
        figures=lambda run: _figures(run, alone=len(compared) < 2),
        together=together,
        comparison=comparison,
        shown_samples=_SHOWN_SAMPLES,
    )
    return html


def _together(folders: Sequence[str | Path]) -> str:
    """Return what is stated for users who are in several of the compared runs."""
    try:
        records, whole = total_of_runs(map(Path, folders))
    except (DprlhfError, OSError) as problem:
        return f"What they cost somebody who is in several of them is not known: {problem}."
    if math.isinf(whole.epsilon):
        return "Nothing is promised to somebody who is in all of them: one adds no noise."
    return (
        f"Each ε is that of one run alone. For somebody who is in all {len(records)} runs (those"
        f" that they build on count), it is {upwards(whole.epsilon, 4)} at"
        f" δ = {upwards(whole.delta, 3)}."
    )


@functools.cache
def _template() -> Any:
    with extra("report", "dprlhf report"):
        import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "number": _shown, "estimate": _estimate, "text": _text, "measure": _heading,
        "unsigned": functools.partial(_estimate, sign=""),
    }  # fmt: skip
    # Whether a mean's 95% interval holds 0, or there is none.
    environment.tests["noise"] = lambda value: not abs(value[0]) > _Z95 * value[1]
    source = resources.files("dprlhf").joinpath("runs/report.html.j2")
    return environment.from_string(source.read_text("utf-8"))


class Series(NamedTuple):
    """A name, and points (round, value, half-width of the band around it, or None) by round."""

    name: str
    points: list[tuple[float, float, float | None]]


@dataclass(frozen=True)
class Figure:
    """Values by round as a table with a bar for each, a title and an explanation."""

    title: str
    about: str
    y: str
    series: list[Series]

    @property
    def rows(self) -> list[tuple[str, float, float, float | None, float]]:
        """Each point with its series' name and its bar's length in percent, from 0 or the least."""
        values = [0.0, *(y for line in self.series for _, y, _ in line.points)]
        low, high = min(values), max(values)
        return [
            (line.name, x, y, e, 100 * (y / 2 - low / 2) / ((high / 2 - low / 2) or 1.0))
            for line in self.series
            for x, y, e in line.points
        ]


def _figures(run: PublishedRun, *, alone: bool = True) -> list[Figure]:
    def column(key: str, error: str | None = None) -> list[tuple[float, float, float | None]]:
        points = []
        for line in run.metrics:
            y = finite_number(line.get(key))
            if y is not None:
                band = _band(line.get(error)) if error else None
                points.append((float(line["round"]), y, band))
        return points

    if run.public_losses:
        learnt = [
            Figure(
                f"{name.capitalize()} on public rows",
                "Mean and 95% confidence band. Round 0 is the model before. Public rows cost no"
                " privacy.",
                name,
                [Series(name, _public_curve(run, name))],
            )
            for name in run.public_losses
        ]
        return [*learnt, *_budget_figures(run, column)]
    public = Figure(
        "Reward on public prompts",
        "Mean and 95% confidence band. Round 0 is the base model. Public prompts cost no privacy.",
        "reward",
        [Series("public reward", _public_reward(run))],
    )
    return [
        *([public] if alone else []),  # else the comparison has drawn it
        *_budget_figures(run, column),
        Figure(
            "Reward on private prompts, noised",
            "Released with each round's gradient, inside the same noise. The band is 95% of the"
            " noise; sampling error comes on top. A round is left out where noise hides it.",
            "noised reward",
            [
                Series(
                    "private reward (noised)",
                    column("private_reward_noised", "private_reward_noise_std"),
                )
            ],
        ),
        Figure(
            "Users with valid rewards, noised",
            "Share of the expected users of a round whose rewards were all valid, as released. How"
            " many users were clipped is not released: it is in secret/ for the operator alone."
            " The band is 95% of the noise, which can carry a share above 1; the number of users in"
            " a round varies, too.",
            "share",
            [Series("valid share (noised)", column("valid_share_noised", "valid_share_noise_std"))],
        ),
    ]


def _budget_figures(run: PublishedRun, column: Callable[..., Any]) -> list[Figure]:
    risk = run.card.get("risk")
    best = finite_number(risk.get("best_guess")) if isinstance(risk, dict) else None
    best = None if best is None else float(upwards(best, 4))
    return [
        Figure(
            "What privacy cost: noise against signal",
            "Norm of the released mean gradient, and the norm that its noise alone would have."
            " Where the two are alike, a single round shows mostly noise; the optimizer averages"
            " over rounds.",
            "norm",
            [
                Series("released gradient", column("released_gradient_norm")),
                Series("expected noise", column("expected_noise_norm")),
            ],
        ),
        Figure(
            "What a guess can gain",
            "Chance of guessing right whether one user took part, for somebody who knows everything"
            " else: at most this from what the run published, after round 0 as after the last. The"
            " whole ε is owed from the first charged round on.",
            "chance",
            [
                Series("by tossing a coin", [(0.0, 0.5, None)]),
                Series("from what was published", [(float(run.rounds), best, None)]),
            ]
            if best is not None
            else [],
        ),
    ]


def _public_reward(run: PublishedRun) -> list[tuple[float, float, float | None]]:
    points: list[tuple[float, float, float | None]] = []
    if run.before:
        points.append((0.0, run.before[0], _Z95 * run.before[1]))
    for line in run.metrics:
        mean = finite_number(line.get("public_reward"))
        if mean is not None:
            band = _band(line.get("public_reward_standard_error"))
            points.append((float(line["round"]), mean, band))
    if run.after:
        points.append((float(run.rounds), run.after[0], _Z95 * run.after[1]))
    return points


def _public_curve(run: PublishedRun, name: str) -> list[tuple[float, float, float | None]]:
    """Return the points of a public metric of a supervised stage, before and after included."""
    curve = [
        (x, *run.evaluation.get(when, {}).get(name, (None, None)))
        for x, when in ((0, "before"), (run.rounds, "after"))
    ]
    for line in run.metrics:
        mean, error = (line.get(f"public_{name}{end}") for end in ("", "_standard_error"))
        curve.append((line["round"], mean, error))
    points: list[tuple[float, float, float | None]] = []
    for x, mean, error in curve:
        y = finite_number(mean)
        if y is not None:
            points.append((float(x), y, _band(error)))
    return sorted(points, key=lambda point: point[0])


def _band(error: Any) -> float | None:
    """Return half the width of a 95% band; None without a standard error, as of a single row."""
    number = finite_number(error)
    return None if number is None or number < 0 else _Z95 * number


def _shown(value: Any, name: str = "") -> str:
    """Return a value of a card as text; a bound by its name stays one when it is rounded.

    >>> _shown(3.69739), _shown(3.69739, "epsilon"), _shown(3.99957, "epsilon_lower")
    ('3.697', '3.698', '3.999')
    """
    if value is None:
        return "–"
    number = finite_number(value)
    if number is None or isinstance(value, int):
        return str(value)
    if name == "epsilon_lower":
        return downwards(number, 4)
    return upwards(number, 4) if name in _UPPER else f"{number:.4g}"


_UPPER = {"epsilon", "delta", "best_guess", "best_guess_at_prior", "gdp_mu"}
"""Upper bounds that a card states."""


def _estimate(value: tuple[float, float] | None, sign: str = "+") -> str:
    if value is None:
        return "–"
    error = "" if math.isnan(value[1]) else f" ± {value[1]:.3f}"
    return f"{value[0]:{sign}.3f}{error}"


def _heading(measure: str) -> str:
    label = measure_label(measure)
    return label[:1].upper() + label[1:]  # capitalize() would write the KL divergence as Kl


def _text(value: Any) -> str:
    """Return a text unchanged, and a conversation as its messages, one a line."""
    if isinstance(value, list):
        return "\n".join(
            f"{m.get('role', '')}: {m.get('content', '')}" if isinstance(m, dict) else str(m)
            for m in value
        )
    return str(value)
