"""The evidence for an assessor: what it says, and which records it does not believe."""

import datetime
import functools
import json
import math
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dprlhf
from dprlhf import DprlhfError
from dprlhf.privacy.ledger import Entry, read_ledger
from dprlhf.recipe import SFTRecipe
from dprlhf.runs.card import note_audit
from dprlhf.runs.earlier import records_of, total_of
from dprlhf.runs.evidence import hashes, write_evidence
from dprlhf.runs.folder import RunFolder
from helpers import tiny
from helpers.stages import people, stage_of

DAY = datetime.date(2026, 11, 23)
Finished = Callable[[str], Path]
PUBLIC = [f"the film was {word}" for word in ("good", "bad", "long", "short")]


def length(completions: list[str], **columns: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def reinforced(model: str, folder: Path, **changes: Any) -> None:
    settings: dict[str, Any] = {
        "prompts": [{"prompt": f"user {i} says", "user": f"u{i}"} for i in range(40)],
        "data__user_column": "user", "data__max_prompt_tokens": 16, "reward": length,
        "evaluation_prompts": PUBLIC, "epsilon": 4.0, "rounds": 3, "rollout__max_new_tokens": 4,
        "quiet": True, "output_dir": folder,
    }  # fmt: skip
    dprlhf.train(model=model, **(settings | changes))


def supervised(model: str, folder: Path) -> None:
    budget = {"epsilon": 4.0}
    made = stage_of(SFTRecipe, model, rounds=2, privacy=budget, output_dir=str(folder))
    dprlhf.train_stage(made, data=people(0, 20), quiet=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished run of each kind, one that builds on the first, and one without privacy."""
    place = tmp_path_factory.mktemp("finished")
    model = str(tiny.save(place / "model"))

    @functools.cache
    def make(name: str) -> Path:
        folder = place / name
        if name == "sft":
            supervised(model, folder)
        elif name == "second":
            first = make("sft")
            reinforced(str(first / "model"), folder, previous=[{"run": str(first)}])
        else:
            reinforced(model, folder, epsilon={"rl": 4.0, "baseline": math.inf}[name])
        return folder

    return make


@pytest.fixture
def run(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished reinforcement run, to be tampered with."""
    shutil.copytree(finished("rl"), tmp_path / "rl")
    return tmp_path / "rl"


def statement_of(run: Path, out: Path, limit: float | None = None) -> dict[str, Any]:
    written = write_evidence(run, out, limit=limit, date=DAY)
    return json.loads(written.json.read_text())


def answers_of(statement: dict[str, Any]) -> dict[str, str]:
    return {row["question"]: row["answer"] for row in statement["answers"]}


def alerted(statement: dict[str, Any], said: str) -> bool:
    return any(said in alert["what"] for alert in statement["alerts"])


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def reforge(run: Path, change: Callable[[list[tuple[str, dict[str, Any]]]], object]) -> None:
    """Rewrite the ledger with an unbroken chain of hashes, as somebody who knows how would."""
    lines = [(entry.kind, entry.body) for entry in read_ledger(run / "ledger.jsonl")]
    change(lines)
    previous, text = "0" * 64, ""
    for number, (kind, body) in enumerate(lines):
        entry = Entry.make(number, kind, body, previous)
        previous, text = entry.hash, text + json.dumps(vars(entry), sort_keys=True) + "\n"
    (run / "ledger.jsonl").write_text(text)


def test_the_answers_are_the_runs_figures(run: Path, tmp_path: Path) -> None:
    statement = statement_of(run, tmp_path / "one")
    card = json.loads((run / "privacy.json").read_text())
    assert statement["guarantee"]["epsilon"] >= card["epsilon"]
    assert statement["guarantee"]["delta"] == card["delta"]
    given = answers_of(statement)
    assert given["Cost of this run alone"].startswith("ε ≤ ")
    assert float(given["Noise multiplier"]) == pytest.approx(card["noise_multiplier"], rel=1e-3)
    assert [a["question"] for a in statement["answers"] if a["answer"] == "not measured"] == [
        "Right guesses of an attack with canary users",
        "Right guesses of an attack with the run's own users", "Lower bound on ε by an audit",
        "Could that audit refute the claim",
    ]  # fmt: skip
    page = (tmp_path / "one" / "evidence.html").read_text()
    assert not re.findall(
        r"<(?:script|link|img|iframe|object|form)\b|src=|href=|@import|url\(", page
    )
    for row in statement["answers"]:
        for name in row["files"].split(", "):
            assert statement["files"][name] in page
    assert all(name in page for name in statement["files"])
    # Nothing secret is read; the same folder gives the same bytes.
    shutil.rmtree(run / "secret")
    assert statement_of(run, tmp_path / "two") == statement
    assert (tmp_path / "two" / "evidence.html").read_text() == page


def test_a_link_into_secret_is_not_followed(run: Path, tmp_path: Path) -> None:
    (run / "policy" / "x-file").symlink_to(run / "secret" / "key")
    (run / "policy" / "x-folder").symlink_to(run / "secret")
    files = statement_of(run, tmp_path / "out")["files"]
    assert "policy/README.md" in files
    assert not [name for name in files if name.startswith("policy/x-")]


def test_a_file_is_hashed_without_being_held_in_memory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(bytes(2**25))
    tracemalloc.start()
    assert [*hashes(RunFolder(tmp_path))] == ["model/weights"]
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.mark.slow
def test_a_baseline_has_no_guarantee(finished: Finished, tmp_path: Path) -> None:
    statement = statement_of(finished("baseline"), tmp_path)
    assert statement["guarantee"]["sentence"] == "no guarantee"
    assert statement["guarantee"]["epsilon"] is None
    assert alerted(statement, "No guarantee")
    assert "≤" not in (tmp_path / "evidence.html").read_text()


@pytest.mark.slow
def test_earlier_runs_are_listed_and_totalled(finished: Finished, tmp_path: Path) -> None:
    statement = statement_of(finished("second"), tmp_path, limit=0.5)
    given = answers_of(statement)
    assert given["Earlier runs counted"] == "sft (sft)"
    records = records_of(finished("second"))
    assert statement["guarantee"]["epsilon"] >= total_of(records).epsilon
    before = float(given["Spent before this run"].split()[2].rstrip(","))
    assert before == pytest.approx(total_of(records[1:]).epsilon, rel=1e-3)
    # Its base model's origin is known, the earlier run; what that spent is above the limit.
    assert [
        alert["what"] for alert in statement["alerts"] if "threshold" not in alert["what"]
    ] == []
    assert alerted(statement, "before this run began")


def test_epsilon_is_owed_from_the_first_charge_on(run: Path, tmp_path: Path) -> None:
    whole = statement_of(run, tmp_path / "whole", limit=3.9)
    assert alerted(whole, "threshold of 3.9 in round 1")
    assert not alerted(statement_of(run, tmp_path / "within", limit=4.0), "threshold")
    reforge(run, lambda lines: lines.__delitem__(slice(3, None)))  # after round 1
    for name in ("checkpoint", "policy"):
        shutil.rmtree(run / name)
    (run / "metrics.jsonl").unlink()
    statement = statement_of(run, tmp_path / "out")
    assert statement["guarantee"]["epsilon"] == whole["guarantee"]["epsilon"]
    assert answers_of(statement)["Rounds charged, each before its release"].startswith("1 of 3;")
    assert alerted(statement, "not finished: 1 rounds")


AUDIT = {
    "bound": 1.2, "epsilon": 4.0, "delta": 1e-5, "canaries": 1000, "guesses": 200, "right": 161,
    "space": "prompt", "confidence": 0.95, "holds": True,
}  # fmt: skip


def test_an_audit_that_holds(run: Path, tmp_path: Path) -> None:
    for right in (101, 161):
        note_audit(RunFolder(run), AUDIT | {"right": right})
    statement = statement_of(run, tmp_path / "out")
    given = answers_of(statement)
    assert given["Right guesses of an attack with canary users"].startswith("161 of 200")
    assert given["Lower bound on ε by an audit"] == "ε ≥ 1.2, confidence 0.95"
    assert given["Could that audit refute the claim"] == "yes"
    assert given["Audits on record, and those that refuted the claim"] == "2, 0"
    assert not alerted(statement, "refuted")
    changes = {"can_refute": False, "accountants_terms": True}
    edit_json(run / "privacy.json", audits=[AUDIT | changes])
    given = answers_of(statement_of(run, tmp_path / "out"))
    assert given["Could that audit refute the claim"].startswith("no")
    assert "in the accountant's terms" in given["Lower bound on ε by an audit"]


@pytest.mark.parametrize("changes", [{"bound": 4.01}, {"holds": False}, {"refuted_by": ["noise"]}])
def test_an_audit_that_refuted_is_not_undone_by_later_ones(run, tmp_path, changes):
    """Whatever the card says of itself: a bound above the stated ε refutes it."""
    edit_json(run / "privacy.json", audits=[AUDIT | changes])
    note_audit(RunFolder(run), AUDIT | {"right": 101})
    statement = statement_of(run, tmp_path / "out")
    assert alerted(statement, "refuted")
    given = answers_of(statement)
    assert given["Right guesses of an attack with canary users"].startswith("161 of 200")
    assert given["Audits on record, and those that refuted the claim"] == "2, 1"


def set_term(name: str, value: Any) -> Callable[[Path], None]:
    return lambda run: reforge(run, lambda lines: lines[0][1].__setitem__(name, value))


def set_charge(name: str, value: Any) -> Callable[[Path], None]:
    return lambda run: reforge(run, lambda lines: lines[1][1].__setitem__(name, value))


def lower_both(run: Path) -> None:
    set_term("epsilon", 1.0)(run)
    edit_json(run / "privacy.json", epsilon=1.0)


def lower_the_total(run: Path) -> None:
    edit_json(run / "privacy.json", total={"epsilon": 0.5, "delta": 1e-5, "runs": "none"})


def age_the_checkpoint(run: Path) -> None:
    edit_json(run / "checkpoint" / "state.json", round=1)


def edit_recipe(run: Path) -> None:
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(re.sub(r"(?m)^seed: .*$", "seed: 12345", text))


def lose_lines(run: Path) -> None:
    reforge(run, lambda lines: lines.__delitem__(slice(3, None)))


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "card states less": (lambda run: edit_json(run / "privacy.json", epsilon=1.0), "disagree on"),
    "both state less": (lower_both, "costs at least"),
    "the total states less": (lower_the_total, "costs at least"),
    "card of another run": (lambda run: edit_json(run / "privacy.json", run="0" * 64), "another"),
    "card damaged": (lambda run: (run / "privacy.json").write_text("{"), "missing or damaged"),
    "card in part": (
        lambda run: edit_json(run / "privacy.json", assumptions=None), "missing or damaged",
    ),
    "card lost": (lambda run: (run / "privacy.json").unlink(), "missing or damaged"),
    "less noise in a round": (set_charge("noise_multiplier", 0.1), "other noise"),
    "more releases in a round": (set_charge("releases_per_round", 2), "other noise"),
    "a round beyond the plan": (set_charge("round", 4), "beyond the plan"),
    "a round twice": (lambda run: reforge(run, lambda x: x.insert(2, x[1])), "twice"),
    "lines lost at the end": (lose_lines, "no charge"),
    "an older checkpoint": (age_the_checkpoint, "older than"),
    "another recipe": (edit_recipe, "not the recipe"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_records_that_disagree_leave_no_epsilon(run: Path, tmp_path: Path, name: str) -> None:
    forge, told = FORGERIES[name]
    forge(run)
    statement = statement_of(run, tmp_path / "out")
    assert alerted(statement, told), statement["alerts"]
    assert not statement["guarantee"]["stands"]
    assert "≤" not in (tmp_path / "out" / "evidence.html").read_text()


def test_what_cannot_be_read_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    def refused(place: Path, told: str) -> None:
        with pytest.raises(DprlhfError, match=told) as error:
            write_evidence(place, tmp_path / "out")
        assert "\n" not in str(error.value)

    refused(tmp_path / "nowhere", "not a run folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(DprlhfError, match=r"file: .*; name another folder with --out"):
        write_evidence(run, tmp_path / "file")
    text = (run / "ledger.jsonl").read_bytes()
    for place in range(0, len(text) - 1, 211):
        altered = bytearray(text)
        altered[place] ^= 1
        (run / "ledger.jsonl").write_bytes(altered)
        refused(run, "ledger.jsonl: line .* altered or lost")
    (run / "ledger.jsonl").write_bytes(b"")
    refused(run, "empty")
    (run / "ledger.jsonl").unlink()
    refused(run, "missing")
