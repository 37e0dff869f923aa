"""Earlier private runs that a run builds on, and the total privacy cost (composition) of all.

A run's ledger opens with its own terms and a record of every earlier run that counts: the terms
that its ledger opened with. So the last ledger alone states the total of all stages. An earlier run
counts in full, whether it was finished or not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprlhf.errors import DprlhfError, unit_in_words
from dprlhf.privacy.accounting import Mechanism, PrivacyCost, epsilon
from dprlhf.privacy.ledger import read_opened
from dprlhf.privacy.partitions import partition_named
from dprlhf.privacy.plan import NO_PRIVACY, Plan
from dprlhf.recipe import AnyRecipe, load_any_recipe
from dprlhf.recipe.privacy import MOST_TUNING_RUNS
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.lineage import KEY, carried_by, is_adapter

if TYPE_CHECKING:
    from dprlhf.privacy.risk import Risk


@dataclass(frozen=True)
class Record:
    """The privacy terms of an earlier run, from its ledger."""

    run: str  # Commitment to the run's key, which identifies the run
    name: str
    stage: str  # Kind of run: sft, reward, dpo, feedback, or rl for private updates
    unit: str | None  # The column that names the user; None where each row is a user
    delta: float  # The δ that it was planned at
    mechanism: dict[str, Any]  # Fields of its :class:`~dprlhf.privacy.accounting.Mechanism`
    disjoint: list[str]  # Commitments of the runs that it was declared to share no user with
    tuning_runs: int = 0  # Number of runs with the same terms on its users that chose its settings


@dataclass(frozen=True)
class Earlier:
    """The earlier runs whose privacy cost counts towards a run's total."""

    # The runs that the recipe names, and the runs before them
    records: list[Record] = field(default_factory=list)
    disjoint: list[str] = field(default_factory=list)  # Runs declared to share no user with this
    # Number of runs with this one's terms on its users that chose its settings
    tuning_runs: int = 0
    # Those of disjoint whose users' hashes are not at hand
    uncompared: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether anything beside this run counts towards the total."""
        return bool(self.records or self.tuning_runs)

    def terms(self) -> dict[str, Any]:
        """Return the terms for the ledger's first entry beside the plan; empty without any."""
        named = {"previous": [asdict(r) for r in self.records], "disjoint": self.disjoint}
        return (named if self.records else {}) | (
            {"tuning_runs": self.tuning_runs} if self.tuning_runs else {}
        )


def read_earlier(recipe: AnyRecipe) -> Earlier:
    """Read the runs that a recipe names under ``previous``, and those that they name."""
    records: dict[str, Record] = {}
    said: dict[str, set[str]] = {}
    read = [records_of(Path(previous.run)) for previous in recipe.previous]
    if read:
        from dprlhf.runs.comparing import check_one_continuation

        check_one_continuation(
            (Path(p.run), own.run) for p, (own, *_) in zip(recipe.previous, read, strict=True)
        )
    for previous, (own, *before) in zip(recipe.previous, read, strict=True):
        for record in (own, *before):
            records.setdefault(record.run, record)
        said.setdefault(own.run, set()).add(previous.users)
    disjoint = [run for run, users in said.items() if users == {"disjoint"}]
    check_lineage(recipe, records)
    for record in records.values():
        if record.unit != recipe.data.unit:
            raise DprlhfError(
                f"previous: {record.name} protects {unit_in_words(record.unit)}, this run"
                f" {unit_in_words(recipe.data.unit)}, so there is no one statement for both: give"
                " both the same data.user_column"
            )
        if not record.mechanism["noise_multiplier"] and not recipe.privacy.baseline:
            raise DprlhfError(
                f"previous: {record.name} has no privacy, so no epsilon can be stated for what"
                " builds on it; use privacy.epsilon=.inf for a non-private baseline"
            )
    return Earlier(list(records.values()), disjoint, recipe.privacy.tuning_runs or 0)


def records_of(run: Path) -> list[Record]:
    """Return the record of a run, and of all runs that came before it."""
    folder = RunFolder(run)
    if not folder.recipe.is_file() or not folder.ledger.is_file():
        carried = carried_by(str(run), fetch=True)
        if not carried:
            raise DprlhfError(
                f"{run}: not the folder of a private run (recipe.yaml, ledger.jsonl), nor a model"
                " that carries the record of one"
            )
        try:
            return [_checked(r) for record in carried for r in record["runs"]]
        except _WRONG:
            raise DprlhfError(
                f"{run}: its privacy record was altered, or is of a newer version of dprlhf; name"
                " the run's own folder"
            ) from None
    return records_in(
        read_opened(folder.ledger)[0].body, load_any_recipe(folder.recipe), run.resolve().name
    )


_WRONG = (TypeError, ValueError, KeyError, AttributeError, OverflowError, DprlhfError)
"""What a record may raise that does not have the fields of today's version, or odd values."""


def _checked(values: Any) -> Record:
    """Return a record of which a total can be stated; one of ``_WRONG`` otherwise."""
    record = Record(**values)
    # YAML, which a model card has, takes 1e-05 for a text.
    noise = float(record.mechanism["noise_multiplier"])
    mechanism = {**record.mechanism, "noise_multiplier": noise}
    record = Record(**{**values, "delta": float(record.delta), "mechanism": mechanism})
    Mechanism(**mechanism)
    texts = [record.run, record.name, record.stage, *record.disjoint]
    right = (
        all(isinstance(text, str) for text in texts)
        and isinstance(record.unit, str | None)
        and isinstance(record.disjoint, list)  # a text would hold every run that is a part of it
        and isinstance(record.tuning_runs, int)
        and 0 <= record.tuning_runs <= MOST_TUNING_RUNS
    )
    if not right:
        raise ValueError
    return record


def records_in(terms: dict[str, Any], recipe: AnyRecipe, name: str) -> list[Record]:
    """Return the record of a run, and of all runs before it, from its ledger's first entry."""
    try:
        own = {
            "run": terms["key_commitment"],
            "name": name,
            "stage": recipe.stage,
            "unit": terms["unit"],
            "delta": terms["delta"],
            "mechanism": cost_terms(terms),
            "disjoint": terms.get("disjoint", []),
            "tuning_runs": terms.get("tuning_runs", 0),
        }
        return [_checked(values) for values in (own, *terms.get("previous", []))]
    except _WRONG:
        raise DprlhfError(
            f"{name}: the first entry of its ledger was altered, or is of another version of dprlhf"
        ) from None


def cost_terms(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the mechanism in a run's terms that its cost depends on.

    Bands and the rate are left out where the cost does not depend on them, as in the records of
    runs from before there were any.
    """
    names = ("rounds", "partition", "adjacency", "participations", "releases_per_round")
    fields = {name: terms[name] for name in ("noise_multiplier", *names)}
    correlated = terms.get("bands", 1) > 1 and not partition_named(terms["partition"]).disjoint
    fields |= {"rate": terms["rate"]} if terms.get("rate") is not None else {}
    return fields | ({"bands": terms["bands"]} if correlated else {})


def all_records(plan: Plan, earlier: Earlier) -> list[Record]:
    """Return the terms of a run's earlier runs, and last its own."""
    own = Record(
        run="",
        name="",
        stage="",
        unit=None,
        delta=plan.guarantee.delta,
        mechanism=cost_terms(vars(plan.mechanism)),
        disjoint=earlier.disjoint,
        tuning_runs=earlier.tuning_runs,
    )
    return [*earlier.records, own]


def total(plan: Plan, earlier: Earlier) -> PrivacyCost:
    """Return the total ε of a run and its earlier runs, at the largest δ of all."""
    return total_of(all_records(plan, earlier))


def total_of(records: Sequence[Record], delta: float | None = None) -> PrivacyCost:
    """Return the total ε of several runs; infinite if one of them has no privacy.

    Two runs may share users unless one declares the other disjoint. Without a δ it is the largest
    of the runs' own.
    """
    delta = max(r.delta for r in records) if delta is None else delta
    if any(not r.mechanism["noise_multiplier"] for r in records):
        return PrivacyCost(math.inf, math.inf, delta, NO_PRIVACY, ())
    return _total(*_runs_of(records), delta)


def risk_of(
    records: Sequence[Record], delta: float | None = None, *, prior: float = 0.5, people: int = 1
) -> Risk:
    """Return the risk of several runs together, the arguments as for :func:`total_of`."""
    from dprlhf.privacy.risk import risk

    delta = max(r.delta for r in records) if delta is None else delta
    mechanisms, shared, times = _runs_of(records)
    return risk(mechanisms, delta, shared=shared, times=times, prior=prior, people=people)


_Runs = tuple[tuple[Mechanism, ...], tuple[tuple[bool, ...], ...], tuple[int, ...]]


def _runs_of(records: Sequence[Record]) -> _Runs:
    """Return the runs' mechanisms, which of them may share users, and how often each was made."""
    shared = tuple(
        tuple(a.run not in b.disjoint and b.run not in a.disjoint for b in records) for a in records
    )
    mechanisms = tuple(Mechanism(**r.mechanism) for r in records)
    return mechanisms, shared, tuple(1 + r.tuning_runs for r in records)


@functools.lru_cache(64)
def _total(
    mechanisms: tuple[Mechanism, ...],
    shared: tuple[tuple[bool, ...], ...],
    times: tuple[int, ...],
    delta: float,
) -> PrivacyCost:
    """Return the total ε, which a run's opening, its card and its report all ask for."""
    if len(mechanisms) == 1 == times[0]:
        return epsilon(mechanisms[0], delta)
    from dprlhf.privacy.composition import total_epsilon

    return total_epsilon(mechanisms, delta, shared, times)


def total_of_runs(
    runs: Iterable[Path], *, disjoint: bool = False, delta: float | None = None
) -> tuple[list[Record], PrivacyCost]:
    """Return the records of several runs and of their earlier runs, and the total ε.

    ``disjoint`` is the caller's declaration that no two of the named runs share a user.
    """
    from dprlhf.runs.comparing import check_apart, check_one_continuation

    runs = list(runs)
    read = [records_of(run) for run in runs]
    names = [records[0].run for records in read]
    check_one_continuation(zip(runs, names, strict=True))
    if disjoint:
        check_apart(zip(runs, names, strict=True))
        read = [
            [Record(**{**asdict(own), "disjoint": [*own.disjoint, *names]}), *before]
            for own, *before in read
        ]
    known: dict[str, Record] = {}
    for records in sorted(read, key=len, reverse=True):
        known |= {r.run: r for r in records[1:] if r.run not in known}
    known |= {records[0].run: records[0] for records in read}
    units = {r.unit for r in known.values()}
    if len(units) > 1:
        raise DprlhfError(
            f"the runs protect {' and '.join(sorted(map(unit_in_words, units)))}, so there is no"
            " one statement for them together"
        )
    return list(known.values()), total_of(list(known.values()), delta)


def check_lineage(recipe: AnyRecipe, named: Collection[str]) -> None:
    """Check that the recipe accounts for every private run that tuned one of its models.

    Called before the models are loaded, and again when those from the hub are on this machine.
    """
    named = set(named)
    for source in recipe.sources:
        key, model = source.key, source.path
        if key is None:
            continue
        runs = runs_of_model(model, source.revision)
        if not runs <= named:
            raise DprlhfError(
                f"{key} {model!r} was tuned by a private run on users of its own: name that run"
                " under previous, so that its cost is counted (the run's folder, or the model:"
                f" previous: [{{run: {model}}}])"
            )
        trained = key.split(".")[0] == "policy"
        # An adapter need not carry a record: PEFT's own save_pretrained writes none.
        if (runs or trained) and is_adapter(model, source.revision):
            raise DprlhfError(
                f"{key} {model!r} is an adapter: name the whole model that dprlhf merge (or the"
                " stage itself, in its folder model/) writes; one that is nobody's must be merged"
                " as well"
            )


def check_lineage_of_objects(
    models: Mapping[str, Any], named: Collection[str], own: str | None = None
) -> None:
    """Check that every private run that tuned a model which a program passes is accounted for."""
    for key, model in models.items():
        tuned_by = runs_of_object(model)
        if own in tuned_by:
            raise DprlhfError(
                f"{key}: this model has taken part in this very run, and may hold its updates,"
                " where the model that the run started from is needed: load that afresh"
            )
        if not tuned_by <= set(named):
            raise DprlhfError(
                f"{key}: this model was tuned by a private run on users of its own: name that run"
                " under previous (privacy_previous of a trainer), so that its cost is counted"
            )


def runs_of_object(model: Any) -> set[str]:
    """Return the runs (by commitment) that tuned a model in memory, as far as it shows.

    transformers keeps the record of ``config.json`` in the model's config; the places that the
    model was loaded from, by transformers and as a reward, are looked at, too.
    """
    config = getattr(model, "config", None)
    carried, place = getattr(config, KEY, None), getattr(config, "_name_or_path", None)
    runs = runs_of_model(place, getattr(config, "_commit_hash", None)) if place else set()
    if (named := getattr(model, "dprlhf_loaded_from", None)) is not None:
        runs |= runs_of_model(*named)
    if carried is None:
        return runs
    try:
        return {*runs, carried["runs"][0]["run"]}
    except (TypeError, KeyError, IndexError):
        raise DprlhfError(
            f"the model's privacy record ({KEY}) was altered, so what it cost its users is not"
            " known; take the model from its run's folder again"
        ) from None


def runs_of_model(model: str, revision: str | None = None) -> set[str]:
    """Return the runs (by commitment) that tuned a model, as its record says."""
    return {carried["runs"][0]["run"] for carried in carried_by(model, revision)}
