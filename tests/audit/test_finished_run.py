"""The audit of a finished run is one of the plan that its ledger records, or none."""

import json
from pathlib import Path
from typing import Any

import pytest

from dprlhf.audit import Audit, audit_run
from dprlhf.errors import DprlhfError
from dprlhf.privacy.ledger import Ledger, read_ledger
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.recipe import dump_recipe
from dprlhf.runs.card import privacy_card
from dprlhf.runs.earlier import read_earlier
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.opening import recipe_digest
from helpers.recipes import least

NOTED: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def _noted(monkeypatch: pytest.MonkeyPatch) -> None:
    NOTED.clear()
    monkeypatch.setattr(
        "dprlhf.audit.one_run.note_audit", lambda folder, found: NOTED.append(found)
    )


def plan_of(**changes: Any) -> Plan:
    """The plan of the recipe below: two rounds in the order of arrival."""
    settings: dict[str, Any] = {"users": 100, "rounds": 2, "delta": 1e-5, "partition": "stream"}
    if "noise_multiplier" not in changes:
        settings["epsilon"] = 4.0
    return make_plan(**(settings | changes))


def finished(folder: Path, plan: Plan, asked: Any = None, **terms: Any) -> Path:
    """The folder of a finished run of one recipe, with a ledger of this plan and these terms."""
    run = RunFolder(folder / "run")
    run.policy.mkdir(parents=True)
    budget = asked or {"epsilon": 4.0}
    recipe = least(privacy={**budget, "delta": 1e-5, "partition": "stream"})
    run.recipe.write_text(dump_recipe(recipe))
    card = privacy_card(recipe, plan, 10, bytes(32), read_earlier(recipe))
    run.privacy.write_text(json.dumps(card))
    opened = {**plan.terms(), "recipe_sha256": recipe_digest(recipe), "key_commitment": "0" * 64}
    Ledger(run.ledger, opened | terms).close()
    return run.path


def audited(run: Path, **options: Any) -> Audit:
    return audit_run(
        run, run.parent / "audit", canaries=40, confidence=0.9999, quiet=True, **options
    )


@pytest.mark.parametrize("asked", [{"epsilon": 4.0}, {"max_guess": 0.7}])
def test_the_plan_of_the_ledger_is_audited(asked: dict[str, float], tmp_path: Path) -> None:
    """An accountant of another day may find other noise for the same epsilon."""
    ledger = plan_of(noise_multiplier=1.2 * plan_of().noise_multiplier)
    found = audited(finished(tmp_path, ledger, asked))
    assert found.epsilon == ledger.guarantee.epsilon < 3.9
    of_audit = read_ledger(tmp_path / "audit/ledger.jsonl")[0].body
    assert of_audit["noise_multiplier"] == ledger.noise_multiplier
    assert [noted["epsilon"] for noted in NOTED] == [found.epsilon]


@pytest.mark.parametrize("change", [1 - 1e-7, 1 + 1e-7])
def test_the_rounding_of_another_processor_is_no_difference(change: float, tmp_path: Path) -> None:
    plan = plan_of()
    run = finished(tmp_path, plan, epsilon=change * plan.guarantee.epsilon)
    assert audited(run).holds


HALVED = plan_of().noise_multiplier / 2
ANOTHER: dict[str, dict[str, Any]] = {
    "epsilon": {"noise_multiplier": HALVED},  # the noise of another epsilon than is stated
    "rounds": {"rounds": 4},
    "partition": {"partition": "fixed"},
    "participations": {"participations": 2},
    "releases_per_round": {"releases_per_round": 2},
    "bands": {"bands": 2},
    "delta": {"delta": 1e-6},
    "adjacency": {"adjacency": "replace-one"},
}


@pytest.mark.parametrize(("name", "terms"), ANOTHER.items(), ids=ANOTHER)
def test_a_ledger_of_another_plan_is_refused(name, terms, tmp_path):
    run = finished(tmp_path, plan_of(), **terms)
    with pytest.raises(DprlhfError, match=rf"ledger.*{name} ") as caught:
        audited(run)
    assert "\n" not in str(caught.value)
    assert not NOTED
    assert not (tmp_path / "audit").exists()


def test_half_the_noise_with_its_own_epsilon_is_audited_for_that(tmp_path: Path) -> None:
    plan = plan_of(noise_multiplier=HALVED)
    assert audited(finished(tmp_path, plan)).epsilon == plan.guarantee.epsilon > 8


def test_another_recipe_than_the_ledgers_is_refused(tmp_path: Path) -> None:
    run = finished(tmp_path, plan_of())
    file = run / "recipe.yaml"
    file.write_text(file.read_text().replace("epsilon: 4.0", "epsilon: 8.0"))
    with pytest.raises(DprlhfError, match=r"not the recipe that its ledger was opened with"):
        audited(run)
