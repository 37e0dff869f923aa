"""The evidence for an assessor: what it says, what it refuses, and what its seal notices."""

from __future__ import annotations

import datetime
import functools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.privacy.ledger import Entry, read_ledger
from dprlhf.recipe import make_recipe
from dprlhf.runs.card import note_audit
from dprlhf.runs.earlier import Record, records_of, total_of
from dprlhf.runs.evidence import answers, seal
from dprlhf.runs.evidence.words import found_at, of_hundred, one_in, right_guesses
from dprlhf.runs.evidence.write import verify_evidence, write_evidence
from dprlhf.runs.folder import RunFolder
from helpers import tiny
from helpers.commands import dprlhf as command
from helpers.marks import slow
from helpers.recipes import recipe_settings

ROOT = Path(__file__).parents[2]
DAY = datetime.date(2026, 11, 23)
Finished = Callable[[str], Path]
NUMBERS = ["11.3.2", "11.3.3", "12.3.1", "12.3.2", "12.3.3"]
PUBLIC = [f"the film was {word}" for word in ("good", "bad", "long", "short")]


def length(completions: list[str], **columns: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def reinforced(model: str, folder: Path, **changes: Any) -> None:
    settings: dict[str, Any] = {
        "prompts": [{"prompt": f"user {i} says", "user": f"u{i}"} for i in range(40)],
        "data__user_column": "user",
        "data__max_prompt_tokens": 16,
        "reward": length,
        "evaluation_prompts": PUBLIC,
        "epsilon": 4.0,
        "rounds": 3,
        "rollout__max_new_tokens": 4,
        "quiet": True,
        "output_dir": folder,
    }
    dprlhf.train(model=model, **(settings | changes))


def supervised(stage: str, model: str, folder: Path) -> None:
    base = {"model_name_or_path": model}
    common: dict[str, Any] = {
        "rounds": 2, "privacy": {"epsilon": 4.0}, "output_dir": str(folder),
        "data": {"path": "in-memory", "user_column": "user"},
    }  # fmt: skip
    answers = {"completion": " aaaa"} if stage == "sft" else {"chosen": " aa", "rejected": " b"}
    rows = [{"user": f"u{i}", "prompt": "it was", **answers} for i in range(20)]
    made: Any = (
        recipe.SFTRecipe.model_validate({"policy": base, **common})
        if stage == "sft"
        else recipe.RewardRecipe.model_validate({"model": base, **common})
    )
    public = [{"user": f"p{i}", "prompt": f"that was {i}", **answers} for i in range(2)]
    dprlhf.train_stage(made, data=rows, evaluation_data=public, quiet=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished run of each stage, one that builds on the first, and one without privacy."""
    place = tmp_path_factory.mktemp("finished")
    model = str(tiny.save(place / "model"))

    @functools.cache
    def make(name: str) -> Path:
        folder = place / name
        if name in ("sft", "reward"):
            supervised(name, model, folder)
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


@pytest.fixture
def key(tmp_path: Path) -> Path:
    seal.new_key(tmp_path / "key")
    return tmp_path / "key"


def statement_of(run: Path, out: Path, **options: Any) -> dict[str, Any]:
    written = write_evidence(run, out, date=DAY, **options)
    found: dict[str, Any] = json.loads(written.json.read_text())["statement"]
    return found


def statuses(statement: dict[str, Any]) -> list[str]:
    return [answer["status"] for answer in statement["answers"]]


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


# --- what it says -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["rl", slow("sft"), slow("reward")])
def test_each_stage_is_answered_point_by_point(
    finished: Finished, tmp_path: Path, stage: str
) -> None:
    statement = statement_of(finished(stage), tmp_path, limit=8.0)
    assert [a["draft_number"] for a in statement["answers"]] == NUMBERS
    assert [a["number"] for a in statement["answers"]] == ["11.2.4", "11.2.5", None, None, None]
    assert statuses(statement) == ["shown", "missing", "shown", "missing", "partly shown"]
    card = json.loads((finished(stage) / "privacy.json").read_text())
    assert statement["guarantee"]["epsilon"] >= card["epsilon"]
    assert statement["guarantee"]["delta"] == card["delta"]
    page = (tmp_path / "evidence.html").read_text()
    for answer in statement["answers"]:
        assert answer["draft_text"].startswith("Verify that")
        assert "OWASP/AISVS/blob" in answer["draft_source"]
        for gap in answer["missing"]:
            assert gap["command"]
        for name in answer["files"]:
            assert name in statement["files"] or name == "metrics.jsonl"
            assert statement["files"][name] in page
    assert "CC BY-SA 4.0" in page
    assert "not a certificate" in page


def test_the_golden_structure(finished: Finished, tmp_path: Path) -> None:
    """Readers of evidence.json rely on these names."""
    statement = statement_of(finished("rl"), tmp_path)
    assert {name: type(value).__name__ for name, value in statement.items()} == {
        "format": "str", "date": "str", "software": "str", "run": "dict", "guarantee": "dict",
        "limit": "NoneType", "alerts": "list", "answers": "list", "rounds": "list", "runs": "list",
        "assumed": "dict", "numbers": "str", "licence": "str", "files": "dict",
        "signed_by": "NoneType", "page_sha256": "str",
    }  # fmt: skip
    for answer in statement["answers"]:
        assert list(answer) == [
            "title", "number", "draft_number", "level", "text", "source", "draft_text",
            "draft_source", "status", "answer", "facts", "missing", "files",
        ]  # fmt: skip
    assert list(statement["rounds"][0]) == ["round", "charged", "saved", "epsilon", "delta"]
    assert statement["date"] == "2026-11-23"


def test_the_page_loads_nothing_and_reads_nothing_secret(run: Path, tmp_path: Path) -> None:
    one = write_evidence(run, tmp_path / "one", date=DAY)
    shutil.rmtree(run / "secret")
    two = write_evidence(run, tmp_path / "two", date=DAY)
    assert one.page.read_bytes() == two.page.read_bytes()  # the same folder, the same bytes
    assert one.json.read_bytes() == two.json.read_bytes()
    page = one.page.read_text()
    assert not re.findall(r"<(?:link|img|iframe|object|form)\b|\bsrc=|@import|url\(", page)
    assert re.findall(r"<script[^>]*>", page) == ['<script type="application/json" id="seal">']
    assert all(
        url.startswith("https://github.com/OWASP/") for url in re.findall(r'href="(h[^"]*)', page)
    )
    assert str(run) not in page.replace(str(run.parent / "model"), "")
    assert "secret/" not in "".join(json.loads(one.json.read_text())["statement"]["files"])


def test_a_link_into_secret_is_not_followed(run: Path, tmp_path: Path) -> None:
    (run / "policy" / "x-file").symlink_to(run / "secret" / "key")
    (run / "policy" / "x-folder").symlink_to(run / "secret")
    files = statement_of(run, tmp_path / "out")["files"]
    assert "policy/README.md" in files
    assert not [name for name in files if name.startswith("policy/x-")]


@pytest.mark.slow
def test_a_baseline_has_no_guarantee(finished: Finished, tmp_path: Path) -> None:
    statement = statement_of(finished("baseline"), tmp_path)
    assert statement["guarantee"]["short"] == "No guarantee"
    assert statement["guarantee"]["epsilon"] is None
    assert any(alert["what"].startswith("No guarantee") for alert in statement["alerts"])
    given = statuses(statement)
    assert [given[i] for i in (0, 2, 4)] == ["no guarantee"] * 3
    assert "≤" not in (tmp_path / "evidence.html").read_text()


@pytest.mark.slow
def test_earlier_runs_are_listed_and_totalled(finished: Finished, tmp_path: Path) -> None:
    statement = statement_of(finished("second"), tmp_path)
    assert [r["name"] for r in statement["runs"]] == ["second", "sft"]
    records = records_of(finished("second"))
    total, before = total_of(records), total_of(records[1:])
    assert statement["guarantee"]["epsilon"] >= total.epsilon > before.epsilon
    rows = statement["rounds"]
    assert (
        rows[0]["epsilon"] == before.epsilon
    )  # what the earlier run spent is there from the start
    assert all(row["epsilon"] >= total.epsilon for row in rows[1:])
    assert statement["alerts"] == []  # its base model's origin is known: the earlier run


def test_epsilon_by_round_is_owed_from_the_first_charge_on(run: Path, tmp_path: Path) -> None:
    reforge(run, lambda lines: lines.__delitem__(slice(3, None)))  # after round 1
    for name in ("checkpoint", "policy"):
        shutil.rmtree(run / name)
    (run / "metrics.jsonl").unlink()
    statement = statement_of(run, tmp_path / "out")
    epsilons = [row["epsilon"] for row in statement["rounds"]]
    assert epsilons[0] == 0
    assert epsilons[1:] == [statement["guarantee"]["epsilon"]] * 3
    assert [row["charged"] for row in statement["rounds"]] == [False, True, False, False]
    assert any("not finished: 1 of 3" in alert["what"] for alert in statement["alerts"])


@pytest.mark.slow
def test_a_crossed_threshold_is_an_alert(finished: Finished, tmp_path: Path) -> None:
    within = statement_of(finished("rl"), tmp_path, limit=4.0)
    above = statement_of(finished("rl"), tmp_path, limit=3.9)
    none = statement_of(finished("rl"), tmp_path)
    said = [any("threshold" in a["what"] for a in s["alerts"]) for s in (within, above, none)]
    assert said == [False, True, False]
    assert "in round 1" in above["alerts"][0]["what"]
    assert [statuses(s)[2] for s in (within, above, none)] == ["shown", "shown", "partly shown"]
    before = statement_of(finished("second"), tmp_path, limit=0.5)
    assert any("before this run began" in alert["what"] for alert in before["alerts"])


@pytest.mark.slow
def test_a_large_epsilon_is_an_alert(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(
        "promises next to" in a["what"] for a in statement_of(finished("rl"), tmp_path)["alerts"]
    )
    monkeypatch.setattr("dprlhf.privacy.plan.LARGE_EPSILON", 1.0)
    [said] = [
        a for a in statement_of(finished("rl"), tmp_path)["alerts"] if "promises" in a["what"]
    ]
    assert "strong guarantee" in said["do"]


@pytest.mark.slow
def test_a_model_from_an_unknown_folder_is_an_alert(finished: Finished, tmp_path: Path) -> None:
    for name in ("rl", "sft", "reward"):
        alerts = statement_of(finished(name), tmp_path)["alerts"]
        assert ["comes from a folder" in alert["what"] for alert in alerts] == [True]


# --- audits -------------------------------------------------------------------------------------

AUDIT = {
    "bound": 1.2, "epsilon": 4.0, "delta": 1e-5, "canaries": 1000, "guesses": 200, "right": 161,
    "space": "prompt", "confidence": 0.95, "holds": True,
}  # fmt: skip


def test_an_audit_that_holds(run: Path, tmp_path: Path) -> None:
    edit_json(run / "privacy.json", audit=AUDIT)
    statement = statement_of(run, tmp_path / "out", limit=8.0)
    assert statuses(statement) == ["shown", "partly shown", "shown", "shown", "partly shown"]
    attack, audit = statement["answers"][1], statement["answers"][3]
    assert "161 of 200" in attack["answer"][0]
    assert "not met" in attack["answer"][1]  # better than guessing: the wording asks for less
    assert ["Measured from below", "ε ≥ 1.2"] in audit["facts"]
    assert "95%" in audit["answer"][0]
    edit_json(run / "privacy.json", audit=AUDIT | {"right": 104})
    fair = statement_of(run, tmp_path / "out")["answers"][1]
    assert "no more than chance" in fair["answer"][1]


def test_an_audit_that_could_refute_nothing_shows_half(run: Path, tmp_path: Path) -> None:
    power = {"probability": 0.9, "noise": 0.031, "guesses": None}
    edit_json(run / "privacy.json", audit=AUDIT | {"can_refute": False, "power": power})
    audit = statement_of(run, tmp_path / "out")["answers"][3]
    assert audit["status"] == "partly shown"
    assert ["It would have noticed", "noise 3.1% too small, with probability 0.9"] in audit["facts"]
    assert any("--canaries" in gap["command"] for gap in audit["missing"])


@pytest.mark.parametrize(
    ("changes", "larger"),
    [({"bound": 4.01}, True), ({"holds": False}, False), ({"refuted_by": ["variance"]}, False)],
)
def test_a_refuted_claim_is_contradicted(
    run: Path, tmp_path: Path, changes: dict[str, Any], larger: bool
) -> None:
    """Whatever the card says of itself: a bound above the stated ε refutes it."""
    edit_json(run / "privacy.json", audit=AUDIT | changes)
    statement = statement_of(run, tmp_path / "out")
    assert any("refuted" in alert["what"] for alert in statement["alerts"])
    assert statuses(statement)[3] == "contradicted"
    said = " ".join(statement["answers"][3]["answer"])
    assert ("It is larger than the stated ε" in said) == larger
    assert "the statement is refuted" in said


def test_an_audit_that_refuted_is_not_undone_by_later_ones(run: Path, tmp_path: Path) -> None:
    """A card of an earlier version holds one audit; those of this version come after it."""
    power = {"probability": 0.9, "noise": 0.031, "guesses": None}
    edit_json(run / "privacy.json", audit=AUDIT | {"holds": False, "right": 199, "power": power})
    for right in (101, 102):
        note_audit(RunFolder(run), AUDIT | {"right": right})
    card = json.loads((run / "privacy.json").read_text())
    assert [audit["right"] for audit in card["audits"]] == [199, 101, 102]
    assert "audit" not in card
    readme = (run / "policy/README.md").read_text()
    assert "Audit: refuted: an attack with 1000 canary users" in readme
    assert "of 3 audits on record 1 refuted the claim" in readme
    statement = statement_of(run, tmp_path / "out")
    assert any("refuted" in alert["what"] for alert in statement["alerts"])
    assert statuses(statement)[3] == "contradicted"
    assert ["Audits on record", "3, of which 1 refuted the statement"] in (
        statement["answers"][3]["facts"]
    )
    assert "199 of 200" in statement["answers"][1]["answer"][0]


@pytest.mark.parametrize("terms", [True, False])
def test_a_bound_in_the_accountants_terms_is_called_that(
    terms: bool, run: Path, tmp_path: Path
) -> None:
    note_audit(RunFolder(run), AUDIT | {"accountants_terms": terms})
    shown = "epsilon >= 1.2 in the accountant's terms at confidence 95%"
    assert (shown in (run / "policy/README.md").read_text()) == terms
    said = statement_of(run, tmp_path / "out")["answers"][3]["answer"][0]
    assert ("ε in the accountant's terms is at least" in said) == terms
    assert ("the true ε is at least" in said) != terms


def test_several_audits_that_hold_are_counted(run: Path, tmp_path: Path) -> None:
    for right in (101, 102):
        note_audit(RunFolder(run), AUDIT | {"right": right})
    assert "of 2 audits on record 0 refuted the claim" in (run / "policy/README.md").read_text()
    statement = statement_of(run, tmp_path / "out", limit=8.0)
    assert statuses(statement)[3] == "shown"
    assert "102 of 200" in statement["answers"][1]["answer"][0]
    said = statement["answers"][3]["answer"]
    assert any("2 audits" in sentence and "10%" in sentence for sentence in said)


@pytest.mark.parametrize("audit", [{}, [], "done", {"bound": "large"}, {"bound": True}, None])
def test_an_unreadable_audit_is_none(run: Path, tmp_path: Path, audit: Any) -> None:
    edit_json(run / "privacy.json", audit=audit)
    assert statuses(statement_of(run, tmp_path / "out"))[3] == "missing"


# --- records that disagree ----------------------------------------------------------------------


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
    assert statement_of(run, tmp_path / "out")["guarantee"]["stands"]
    forge(run)
    statement = statement_of(run, tmp_path / "out")
    assert any(told in alert["what"] for alert in statement["alerts"]), statement["alerts"]
    assert not statement["guarantee"]["stands"]
    assert [statuses(statement)[i] for i in (0, 2, 4)] == ["contradicted"] * 3


def test_what_cannot_be_read_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    def refused(place: Path, told: str) -> None:
        with pytest.raises(DprlhfError, match=told) as error:
            write_evidence(place, tmp_path / "out")
        assert "\n" not in str(error.value)

    refused(tmp_path / "nowhere", "not a run folder")
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


# --- the seal -------------------------------------------------------------------------------------


def test_signed_evidence_verifies(run: Path, key: Path, tmp_path: Path) -> None:
    written = write_evidence(run, key=key, date=DAY)
    again = write_evidence(run, tmp_path / "again", key=key, date=DAY)
    assert written.page == run / "comply" / "evidence.html"
    assert written.page.read_bytes() == again.page.read_bytes()
    public = key.with_name("key.pub")
    for file in (written.page, written.json):
        for told in (None, public, key):
            said = verify_evidence(file, public_key=told)
            assert "unaltered, signed by" in said[0]
            assert "files of" in said[1]  # the folder around it was found
            assert ("compare" in said[0]) == (told is None)
    assert "were not checked" in verify_evidence(again.page)[1]
    assert "files of" in verify_evidence(again.json, run)[1]
    assert "Not signed" not in written.page.read_text()


@pytest.mark.parametrize("name", ["evidence.html", "evidence.json"])
def test_every_changed_byte_is_noticed(run: Path, key: Path, tmp_path: Path, name: str) -> None:
    write_evidence(run, tmp_path / "out", key=key, date=DAY)
    file = tmp_path / "out" / name
    good = file.read_bytes()
    places = np.random.default_rng(0).integers(0, len(good), 300)
    for place in [*map(int, places), 0, len(good) - 1]:
        altered = bytearray(good)
        altered[place] ^= 1 << (place % 8)
        file.write_bytes(altered)
        with pytest.raises(DprlhfError):
            verify_evidence(file)
    for text in (good + b"<p>more</p>", good + b" ", b"\n" + good, good[:-1], b"", b"{}", b"[]"):
        file.write_bytes(text)
        with pytest.raises(DprlhfError, match="altered"):
            verify_evidence(file)


def test_a_page_around_a_true_seal_is_refused(run: Path, key: Path, tmp_path: Path) -> None:
    """The signature covers what a reader sees, not only the JSON behind it."""
    page = write_evidence(run, tmp_path / "out", key=key, date=DAY).page
    text = page.read_text()
    assert "missing" in text
    page.write_text(
        text.replace('<span class="chip missing">missing', '<span class="chip shown">shown')
    )
    with pytest.raises(DprlhfError, match="altered"):
        verify_evidence(page)


def test_another_key_is_refused(run: Path, key: Path, tmp_path: Path) -> None:
    page = write_evidence(run, tmp_path / "out", key=key, date=DAY).page
    seal.new_key(tmp_path / "other")
    with pytest.raises(DprlhfError, match="another key"):
        verify_evidence(page, public_key=tmp_path / "other.pub")
    # Somebody else signs the same statement: no longer the given key.
    values = json.loads((tmp_path / "out/evidence.json").read_text())
    forged = tmp_path / "forged.json"
    forged.write_text(seal.sealed(values["statement"], seal.read_key(tmp_path / "other")))
    assert verify_evidence(forged)
    with pytest.raises(DprlhfError, match="another key"):
        verify_evidence(forged, public_key=key)


def test_unsigned_evidence_says_so_and_does_not_verify(run: Path, tmp_path: Path) -> None:
    written = write_evidence(run, tmp_path / "out", date=DAY)
    assert not written.signed
    assert "<strong>Not signed</strong>" in written.page.read_text()
    for file in (written.page, written.json):
        with pytest.raises(DprlhfError, match="not signed"):
            verify_evidence(file)


@pytest.mark.parametrize(
    "name", ["privacy.json", "ledger.jsonl", "policy/adapter_model.safetensors"]
)
def test_a_changed_file_of_the_run_is_noticed(run: Path, key: Path, name: str) -> None:
    page = write_evidence(run, key=key, date=DAY).page
    content = bytearray((run / name).read_bytes())
    content[len(content) // 2] ^= 1
    (run / name).write_bytes(content)
    with pytest.raises(DprlhfError, match=f"{name} changed or disappeared"):
        verify_evidence(page)
    (run / name).unlink()
    with pytest.raises(DprlhfError, match=f"{name} changed or disappeared"):
        verify_evidence(page)


def test_a_key_that_cannot_be_used_is_refused(run: Path, key: Path, tmp_path: Path) -> None:
    assert key.stat().st_mode & 0o077 == 0
    with pytest.raises(DprlhfError, match="no key was written"):
        seal.new_key(key)
    locked = tmp_path / "locked"
    locked.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    inside = run / "key"
    shutil.copy(key, inside)
    (tmp_path / "text").write_text("no key")
    for file, told in (
        (locked, "passphrase"), (inside, "outside of the run folder"), (tmp_path / "text", "PEM"),
        (tmp_path / "none", "could not be read"), (key.with_name("key.pub"), "PEM"),
    ):  # fmt: skip
        with pytest.raises(DprlhfError, match=told):
            write_evidence(run, tmp_path / "out", key=file)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command(run: Path, tmp_path: Path) -> None:
    made = command("comply", "--new-key", str(tmp_path / "key"))
    assert made.returncode == 0
    assert re.search(r"fingerprint: (\w{4} ){9}\w{4}\n", made.stdout)
    done = command("comply", str(run), "--key", str(tmp_path / "key"), "--limit", "8")
    assert done.returncode == 1  # an alert: the model's folder
    assert "alert: The base model" in done.stderr
    page = run / "comply" / "evidence.html"
    assert done.stdout.split() == [str(page), str(page.with_suffix(".json"))]
    checked = command("comply", "--verify", str(page), "--public-key", str(tmp_path / "key.pub"))
    assert checked.returncode == 0
    assert len(checked.stdout.splitlines()) == 2
    (run / "privacy.json").write_text("{}")
    limits = [(str(run), "--limit", limit) for limit in ("0", "inf")]
    for words in (("--verify", str(page)), (), (str(tmp_path),), *limits):
        refused = command("comply", *words)
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1
    unsigned = command("comply", str(run))
    assert "not signed" in unsigned.stderr


# --- what the words say ---------------------------------------------------------------------------


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.floats(0.0, 50.0), st.floats(1e-9, 0.1), st.floats(0.0, 1.0))
def test_the_plain_numbers_are_upper_bounds(epsilon: float, delta: float, alarms: float) -> None:
    """Checked against every point of the region that (ε, δ) allows (arXiv 1311.0776)."""
    alpha = np.linspace(0, 1, 2001)
    missed = np.maximum.reduce(
        [
            np.zeros_like(alpha),
            1 - delta - np.exp(epsilon) * alpha,
            np.exp(-epsilon) * (1 - delta - alpha),
        ]
    )
    best = float((1 - (alpha + missed) / 2).max())
    assert right_guesses(epsilon, delta) >= best - 1e-9
    assert right_guesses(epsilon, delta) <= best + 0.001 * math.exp(min(epsilon, 5)) + 1e-9
    found = found_at(alarms, epsilon, delta)
    assert found >= 1 - float(np.interp(alarms, alpha, missed)) - 1e-9
    assert float(of_hundred(found)) >= 100 * found - 1e-6 or found == 1
    assert 1 / float(one_in(delta)[5:].replace(",", "")) >= delta * (1 - 1e-6)


@pytest.mark.parametrize("z", [0.5, 1.0, 3.0])
def test_the_plain_numbers_hold_for_a_gaussian(z: float) -> None:
    """The best attack on one Gaussian release stays below what the page says."""
    random = np.random.default_rng(1)
    noise, delta = random.normal(0, z, 200_000), 1e-5
    right = ((noise < 0.5).mean() + (noise + 1 > 0.5).mean()) / 2
    assert right < right_guesses(gaussian_epsilon(z, delta), delta)
    cut = np.quantile(noise, 0.99)
    assert (noise + 1 > cut).mean() < found_at(0.01, gaussian_epsilon(z, delta), delta) + 0.002


@pytest.mark.parametrize(
    ("mechanism", "changes", "expected"),
    [
        ({"partition": "random-allocation"}, {}, ["random_allocation_accounting"]),
        ({"partition": "random-allocation", "bands": 2}, {},
         ["correlated_noise", "correlated_random_allocation"]),
        ({"partition": "fixed", "bands": 2}, {}, ["correlated_noise", "disjoint_batches"]),
        ({"partition": "stream"}, {"tuning_runs": 2}, ["composition", "disjoint_batches"]),
        ({"partition": "poisson", "releases_per_round": 4},
         {"update": {"name": "npg", "oracle": {"name": "improper-batch-sgd"}}},
         ["releases_in_a_round", "gradient_oracles"]),
        ({"partition": "poisson"},
         {"update": {"name": "npg", "oracle": {"name": "sufficient-statistics", "sketch": 8}}},
         ["sufficient_statistics"]),
        ({"partition": "poisson"},
         {"update": {"name": "pg", "subspace": {"rank": 2, "source": "model"}}}, ["subspace"]),
    ],
    ids=str,
)  # fmt: skip
def test_the_proofs_are_those_of_what_ran(
    mechanism: dict[str, Any], changes: dict[str, Any], expected: list[str]
) -> None:
    tuning_runs = changes.pop("tuning_runs", 0)
    record = Record("run", "name", "rl", None, 1e-5, mechanism, [], tuning_runs)
    made = make_recipe(recipe_settings(**changes))
    named = answers._proofs(mock.Mock(runs=[record], recipe=made))
    assert set(named) == {"users_and_clipping", "resume", *expected}
    assert all((ROOT / "docs" / "proofs" / f"{note}.md").is_file() for note in named)
