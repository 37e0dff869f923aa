"""The terms of earlier runs: what a record of one must hold for the total to be right."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dprlhf.cli.app import app
from dprlhf.errors import DprlhfError
from dprlhf.privacy import correlated_allocation
from dprlhf.privacy.accounting import Mechanism
from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.privacy.ledger import Ledger, new_nonce
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.recipe import dump_recipe, make_recipe
from dprlhf.runs import earlier
from dprlhf.runs.earlier import (
    Earlier,
    Record,
    cost_terms,
    read_earlier,
    records_of,
    total,
    total_of,
    total_of_runs,
)
from dprlhf.runs.lineage import FILE
from helpers.recipes import recipe_settings


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {"users": 64, "rounds": 4, "delta": 1e-5, "noise_multiplier": 2.0}
    return make_plan(**(values | changes))


def record(terms: dict[str, Any]) -> Record:
    return Record("a", "a", "rl", None, 1e-5, cost_terms(terms), [])


def test_the_total_counts_an_earlier_run_with_its_correlation(monkeypatch):
    monkeypatch.setattr(correlated_allocation, "_DRAWS", 2**15)
    correlated_allocation.epsilon.cache_clear()
    allocated = plan(bands=4)
    alone = total_of([record(allocated.terms())])
    assert alone.epsilon == pytest.approx(allocated.guarantee.epsilon)
    assert alone.epsilon > total_of([record(plan().terms())]).epsilon * 1.2
    both = total(allocated, Earlier([record(allocated.terms())]))
    assert alone.epsilon < both.epsilon <= gaussian_epsilon(2.0 / 2**0.5, 1e-5) * (1 + 1e-6)
    correlated_allocation.epsilon.cache_clear()


def go_on(run: Path, *rounds: int, counter: int = 0, **others: Any) -> Path:
    """Charge rounds of a run, whose folder is made where there is none."""
    run.mkdir(exist_ok=True)
    (run / "recipe.yaml").write_text(dump_recipe(make_recipe(recipe_settings())))
    terms = {**plan().terms(), "unit": None, "key_commitment": "c" * 64, **others}
    ledger = Ledger(run / "ledger.jsonl", terms)
    for number in rounds:
        ledger.charge(number, noise_multiplier=2.0, clip_norm=terms["clip_norm"])
    if counter:
        ledger.note_book({"book": "b", "reservation": 1, "counter": counter})
    ledger.close()
    return run


def test_all_earlier_runs_and_their_tuning_count(tmp_path: Path) -> None:
    named = [Record(**{**asdict(record(plan().terms())), "run": c * 64}) for c in "de"]
    run = go_on(tmp_path / "run", 1, previous=[asdict(r) for r in named], tuning_runs=2)
    records = records_of(run)
    assert [r.run[0] for r in records] == ["c", "d", "e"]
    five = [Record(**{**asdict(records[1]), "run": str(i) * 64}) for i in range(5)]
    whole = total_of_runs([run])[1].epsilon
    assert whole == pytest.approx(total_of(five).epsilon, rel=1e-6)
    assert whole > 1.05 * total_of(five[:3]).epsilon
    table = CliRunner().invoke(app, ["privacy", "total", str(run)])
    assert "2 tuning runs" in table.output, table.output


def test_runs_with_two_units_have_no_one_statement(tmp_path: Path) -> None:
    runs = [
        go_on(tmp_path / c, 1, key_commitment=c * 64, unit=u)
        for c, u in (("a", None), ("b", "who"))
    ]
    with pytest.raises(DprlhfError, match="rows and users by the column 'who'"):
        total_of_runs(runs)


def test_two_continuations_of_one_run_are_not_one_run(tmp_path, monkeypatch):
    """Both have the key and the terms of one run, but some rounds released twice."""
    monkeypatch.setattr("dprlhf.privacy.ledger.new_nonce", new_nonce)
    one = go_on(tmp_path / "one", 1)
    old, two = (Path(shutil.copytree(one, tmp_path / name)) for name in ("old", "two"))
    go_on(one, 2, 3)
    named = [{"run": str(one)}, {"run": str(old)}]
    assert len(read_earlier(make_recipe(recipe_settings(previous=named))).records) == 1
    assert total_of_runs([one, old])[1].epsilon == total_of_runs([one])[1].epsilon
    last = Path(shutil.copytree(one, tmp_path / "last"))
    go_on(one, counter=3)
    go_on(last, counter=4)
    assert len(total_of_runs([one, last])[0]) == 1  # what they noted later released nothing
    go_on(two, 2)
    (two / "policy").mkdir()
    carried = {"runs": [asdict(record) for record in records_of(two)]}
    (two / "policy" / FILE).write_text(json.dumps(carried))
    for other in (two, two / "policy"):
        said = r"two continuations of one run: .* at noise multiplier 1\.414 in place of 2$"
        with pytest.raises(DprlhfError, match=said):
            total_of_runs([old, one, other])
        named = [{"run": str(one)}, {"run": str(other)}]
        with pytest.raises(DprlhfError, match=said):
            read_earlier(make_recipe(recipe_settings(previous=named)))


def terms_of(**changes: Any) -> dict[str, Any]:
    """The terms of a run as a model carries them."""
    return {**asdict(record(plan(partition="fixed").terms())), **changes}


def carry(model: Path, terms: Any) -> Path:
    model.mkdir(exist_ok=True)
    (model / FILE).write_text(json.dumps({"runs": [terms]}))
    return model


def test_a_record_of_a_run_without_privacy_is_read(tmp_path: Path) -> None:
    terms = terms_of(unit="user")
    terms["mechanism"]["noise_multiplier"] = 0
    assert total_of_runs([carry(tmp_path / "model", terms)])[1].epsilon == float("inf")


@pytest.mark.parametrize(
    "changes",
    [
        {"run": ["a"]}, {"name": None}, {"stage": 1}, {"unit": []}, {"delta": 10**400},
        *({"tuning_runs": count} for count in (-5, 10**13, "3", 1.5, None)),
        {"disjoint": None}, {"disjoint": "abc"}, {"disjoint": [["a"]]}, {"later": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_altered_record_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = carry(tmp_path / "model", terms_of())
    assert total_of_runs([model])[1].epsilon > 0
    carry(model, terms_of(**changes))
    with pytest.raises(DprlhfError, match=r"privacy record .* altered") as refusal:
        total_of_runs([model])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("rounds"), lambda m: m.pop("noise_multiplier"),
        lambda m: m.update(later=1), lambda m: m.update(rounds="4"),
        lambda m: m.update(partition="later"), lambda m: m.update(partition=[]),
        lambda m: m.update(noise_multiplier=-1), lambda m: m.update(noise_multiplier=10**400),
        lambda m: m.update(participations=9),
    ],
)  # fmt: skip
def test_an_altered_mechanism_is_refused_in_one_line(tmp_path: Path, change: Any) -> None:
    terms = terms_of()
    change(terms["mechanism"])
    model = carry(tmp_path / "model", terms)
    with pytest.raises(DprlhfError, match="altered, or is of a newer version"):
        total_of_runs([model])
    with pytest.raises(DprlhfError, match="altered, or is of a newer version"):
        read_earlier(make_recipe(recipe_settings(previous=[{"run": str(model)}])))


OWN = Record("k", "a", "rl", None, 1e-5, cost_terms(vars(Mechanism(2.0, 4, "fixed"))), [])


def test_a_run_that_is_also_called_shared_is_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(earlier, "records_of", lambda run: [OWN])
    both = [("run", "disjoint"), ("model", "shared")]
    previous = [{"run": str(tmp_path / place), "users": users} for place, users in both]
    assert read_earlier(make_recipe(recipe_settings(previous=previous))).disjoint == []


def test_a_model_of_two_runs_needs_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "runs_of_model", lambda model, revision=None: {"a", "b"})
    made = make_recipe(recipe_settings())
    with pytest.raises(DprlhfError, match="tuned by a private run"):
        earlier.check_lineage(made, ["a"])
    earlier.check_lineage(made, ["b", "a"])


def test_a_total_is_stated_at_the_delta_that_is_asked(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"runs": [asdict(OWN)]}))
    _, cost = total_of_runs([tmp_path], delta=1e-7)
    true = gaussian_epsilon(2.0, 1e-7)
    assert (cost.delta, cost.epsilon) == (1e-7, pytest.approx(true))
    done = CliRunner().invoke(app, ["privacy", "total", str(tmp_path), "--delta", "1e-7", "--json"])
    assert json.loads(done.output)["delta"] == 1e-7
    assert json.loads(done.output)["epsilon"] == pytest.approx(true)


def test_only_runs_that_are_stated_to_be_apart_cost_as_much_as_the_dearest(tmp_path: Path) -> None:
    """--disjoint is said of the runs that are named, not of those that came before them."""
    for name, z in (("one", 2.0), ("two", 3.0)):
        own, before = (
            {**asdict(OWN), "run": run, "name": run, "mechanism": {**OWN.mechanism, **changed}}
            for run, changed in ((name, {"noise_multiplier": z}), (f"before {name}", {}))
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(json.dumps({"runs": [own, before]}))

    def stated(*options: str) -> float:
        command = ["privacy", "total", str(tmp_path / "one"), str(tmp_path / "two"), "--json"]
        done = CliRunner().invoke(app, [*command, *options])
        assert done.exit_code == 0, done.output
        return float(json.loads(done.stdout)["epsilon"])

    def together(*multipliers: float) -> float:
        """The ε of a user in all of these: their noise multipliers add up in inverse squares."""
        return gaussian_epsilon(sum(z**-2 for z in multipliers) ** -0.5, 1e-5)

    assert stated() == pytest.approx(together(2, 2, 2, 3), rel=1e-4)
    assert stated("--disjoint") == pytest.approx(together(2, 2, 2), rel=1e-4)
