"""Writing the evidence on a run as one page and as JSON, and checking evidence that was written."""

from __future__ import annotations

import datetime
import functools
import math
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from dprlhf.errors import DprlhfError, one_line
from dprlhf.privacy.gaussian import upwards
from dprlhf.privacy.plan import json_ready
from dprlhf.runs.card import software_version
from dprlhf.runs.evidence.answers import answers_of
from dprlhf.runs.evidence.findings import alerts_of, rounds_of, runs_of
from dprlhf.runs.evidence.records import Records, hashes, read_records
from dprlhf.runs.evidence.requirements import LICENCE, NUMBERS
from dprlhf.runs.evidence.seal import (
    check_signature,
    fingerprint,
    open_seal,
    page_hash,
    public_hex,
    read_key,
    read_public_key,
    sealed,
    with_seal,
)
from dprlhf.runs.evidence.words import explanation, one_in, pair
from dprlhf.runs.folder import RunFolder, write_atomically
from dprlhf.runs.model_card import guarantee_sentence
from dprlhf.runs.plots import Series, line_plot

_NAME = "evidence"


class Written(NamedTuple):
    """The files of the evidence, and what a reader has to know before relying on them.

    Attributes:
        page: The HTML page.
        json: The same content as JSON.
        alerts: The alerts, as sentences.
        signed: Whether both are signed.
    """

    page: Path
    json: Path
    alerts: list[str]
    signed: bool


def write_evidence(
    run: str | Path,
    out: str | Path | None = None,
    *,
    key: str | Path | None = None,
    limit: float | None = None,
    date: datetime.date | None = None,
) -> Written:
    """Write the evidence on a run: ``evidence.html`` and ``evidence.json``.

    Everything is computed from the run's public files; the same files, key, limit and day give the
    same bytes.

    Args:
        run: The run folder.
        out: The folder to write to; None takes ``comply`` in the run folder.
        key: An Ed25519 private key in PEM form to sign with; None writes unsigned evidence.
        limit: The organisation's threshold for ε; an alert says when it was crossed.
        date: The day to state; None takes today's, in UTC.

    Raises:
        DprlhfError: No run is there, its ledger was altered, the key cannot be used, or the files
            cannot be written.
    """
    if limit is not None and not 0 < limit < math.inf:
        raise DprlhfError(f"--limit must be a positive number, not {limit:g}")
    signer = None
    if key is not None:
        if Path(key).resolve().is_relative_to(Path(run).resolve()):
            raise DprlhfError(f"{key}: keep the key outside of the run folder, which is published")
        signer = read_key(Path(key))
    day = date or datetime.datetime.now(datetime.UTC).date()
    statement = statement_on(read_records(Path(run)), limit, day)
    statement["signed_by"] = fingerprint(public_hex(signer)) if signer else None
    try:
        page = render(statement)
        seal = sealed({**statement, "page_sha256": page_hash(page)}, signer)
    except ValueError as error:  # such as a number or a character that no JSON file may have
        raise DprlhfError(f"{run}: a record cannot be stated ({one_line(error)})") from None
    folder = Path(out) if out is not None else Path(run) / "comply"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DprlhfError(f"{folder}: {error.strerror}") from None
    files = folder / f"{_NAME}.html", folder / f"{_NAME}.json"
    write_atomically(files[0], with_seal(page, seal))
    write_atomically(files[1], seal)
    return Written(*files, [a["what"] for a in statement["alerts"]], signer is not None)


def verify_evidence(
    file: str | Path, run: str | Path | None = None, *, public_key: str | Path | None = None
) -> list[str]:
    """Check the signature of evidence and, where the run is at hand, the hashes of its files.

    Args:
        file: ``evidence.html`` or ``evidence.json``.
        run: The run folder; None looks whether the evidence stands in one.
        public_key: The key, in PEM form, that must have signed; None accepts any.

    Returns:
        What was checked and what was not, as sentences.

    Raises:
        DprlhfError: The evidence is not signed, was altered, was signed by another key, or a file
            of the run is no longer the one that it is about.
    """
    path = Path(file)
    values = open_seal(path)
    expected = None if public_key is None else read_public_key(Path(public_key))
    signer = check_signature(path, values, expected)
    said = [
        f"{path}: unaltered, signed by the key {signer}"
        + ("" if expected else "; compare this with what the signer told you, or give --public-key")
    ]
    place = Path(run) if run is not None else path.resolve().parent.parent
    if run is None and not RunFolder(place).recipe.is_file():
        return [*said, "the run's files were not checked: name the run folder, too"]
    RunFolder(place).require()
    stated: dict[str, str] = values["statement"]["files"]
    held = hashes(RunFolder(place))
    changed = sorted(name for name in stated if held.get(name) != stated[name])
    if changed:
        raise DprlhfError(
            f"{place}: {', '.join(changed)} changed or disappeared after the evidence was written;"
            " it is about another state of this run"
        )
    return [*said, f"{len(stated)} files of {place} are the ones that it is about"]


def statement_on(records: Records, limit: float | None, date: datetime.date) -> dict[str, Any]:
    """Return all that the page says, JSON-ready, but for the signature and the page's hash."""
    stands = records.private and not records.contradictions
    total = records.total
    return {
        "format": "dprlhf evidence 1",
        "date": date.isoformat(),
        "software": f"dprlhf {software_version()}",
        "run": {
            "name": records.name,
            "stage": records.recipe.stage,
            "commitment": records.terms["key_commitment"],
            "rounds": records.rounds,
            "finished": records.finished,
            "private": records.private,
        },
        "guarantee": {
            "stands": stands,
            "epsilon": json_ready(total.epsilon) if stands else None,
            "delta": total.delta if stands else None,
            "short": pair(total.epsilon, total.delta) if stands else _none(records),
            "sentence": guarantee_sentence(records.card) if stands else None,
            "explained": explanation(total.epsilon, total.delta) if stands else None,
        },
        "limit": limit,
        "alerts": alerts_of(records, limit),
        "answers": answers_of(records, limit),
        "rounds": rounds_of(records),
        "runs": runs_of(records),
        "assumed": {
            "public": list(records.card.get("assumed_public", [])),
            "true": list(records.card.get("assumptions", [])),
        },
        "numbers": NUMBERS,
        "licence": LICENCE,
        "files": hashes(records.folder),
    }


def render(statement: dict[str, Any]) -> str:
    """Return the page without its seal: HTML that loads no other file and runs no script."""
    html: str = _template().render(s=statement, figure=_figure(statement))
    return html


def _none(records: Records) -> str:
    return "No guarantee" if not records.private else "No confirmed guarantee"


def _figure(statement: dict[str, Any]) -> str | None:
    rows = statement["rounds"]
    if any(isinstance(row["epsilon"], str) for row in rows):
        return None
    steps: list[tuple[float, float, float | None]] = []
    for row, last in zip(rows, [rows[0], *rows], strict=False):
        steps += [
            (float(row["round"]), y, None) for y in dict.fromkeys((last["epsilon"], row["epsilon"]))
        ]
    shown = [Series("ε spent", steps)]
    if statement["limit"] is not None:
        ends = (rows[0]["round"], rows[-1]["round"])
        shown.append(Series("threshold", [(float(t), statement["limit"], None) for t in ends]))
    return line_plot(shown, "round", "ε", from_zero=True)


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "up": lambda value: upwards(value, 4),
        "share": lambda value: one_in(value) if value else "0",
    }
    source = resources.files("dprlhf").joinpath("runs/evidence/page.html.j2")
    return environment.from_string(source.read_text("utf-8"))
