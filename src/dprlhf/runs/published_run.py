"""The published files of a run folder, read one by one for the report.

Nothing is read from ``secret/``. A file that is missing, damaged or of another shape becomes a
sentence in :attr:`PublishedRun.problems`, and the others are read all the same.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dprlhf.errors import DprlhfError
from dprlhf.privacy.ledger import charged_rounds
from dprlhf.recipe import load_any_recipe
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.model_card import guarantee_sentence, in_plain_words

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
        return _mean([finite_number(s.get("reward_before")) for s in self.samples])

    @property
    def after(self) -> tuple[float, float] | None:
        """Mean reward of the tuned policy on the public prompts, and its standard error."""
        return _mean([finite_number(s.get("reward_after")) for s in self.samples])

    @property
    def rise(self) -> tuple[float, float] | None:
        """The mean difference on the same prompts and draws, and its standard error."""
        pairs = [
            (finite_number(s.get("reward_before")), finite_number(s.get("reward_after")))
            for s in self.samples
        ]
        return _mean([b - a for a, b in pairs if a is not None and b is not None])


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
        run.evaluation = _attempt(run, folder.evaluation, _estimates, {})
        run.win_rates = _attempt(run, folder.evaluation, _win_rates, {})
        run.value = _attempt(run, folder.evaluation, _values, {})
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


def _estimates(file: Path) -> dict[str, dict[str, tuple[float, float]]]:
    return {
        when: {
            name: (float(value["mean"]), _or_nan(value["standard_error"]))
            for name, value in values.items()
            if value["mean"] is not None
        }
        for when, values in _json_of(dict)(file).items()
        if when in ("before", "after")
    }


def _values(file: Path) -> dict[str, tuple[float, float, float]]:
    values = _json_of(dict)(file).get("value", {})
    return {
        name: (_or_nan(value["mean"]), float(value["low"]), float(value["high"]))
        for name, value in values.items()
    }


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)


def _win_rates(file: Path) -> dict[str, tuple[float, float, float]]:
    compared = _json_of(dict)(file).get("compared", {})
    rates = {name: one["win_rate"] for name, one in compared.items()}
    return {
        name: (float(rate["rate"]), float(rate["low"]), float(rate["high"]))
        for name, rate in rates.items()
        if rate["rate"] is not None
    }


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
