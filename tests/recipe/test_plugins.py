"""An update of another package: found by its entry point, validated, charged and shown like any."""

import importlib.metadata
import json
from pathlib import Path
from typing import Literal

import pytest
import yaml

from dprlhf.errors import DprlhfError
from dprlhf.privacy.ledger import read_ledger
from dprlhf.recipe import PositiveFloat, PrivateUpdate, UpdatePlugin, dump_recipe, load_recipe
from dprlhf.updates import PrivateRound, find_update
from dprlhf.updates.pg import policy_gradient
from helpers.recipes import least
from helpers.runs import save_sharp, train


class Halved(PrivateUpdate):
    """A policy gradient whose steps are shortened by a factor."""

    name: Literal["halved"] = "halved"
    factor: PositiveFloat = 0.5
    baseline: Literal["loo"] = "loo"
    max_importance_ratio: float = 2.0
    inner: int = 1

    @property
    def releases(self) -> int:
        return self.inner


def halved(round_: PrivateRound, spec: Halved) -> None:
    policy_gradient(round_, spec)  # type: ignore[arg-type]


def greedy(round_: PrivateRound, spec: Halved) -> None:
    """Release once more than the settings say."""
    for _ in range(spec.releases + 1):
        policy_gradient(round_, spec)  # type: ignore[arg-type]


def ungated(round_: PrivateRound, spec: Halved) -> None:
    """Step along a sum that no gate has seen."""
    from dprlhf.boundary import Private, open_private

    ones = Private(open_private(round_.scores).values * 0 + 1)
    clipped = round_.clipped_sum(ones, batch_size=spec.batch_size)
    round_.step(clipped.bounded)  # type: ignore[arg-type]


def install(monkeypatch: pytest.MonkeyPatch, *offered: tuple[str, object]) -> None:
    """Have packages installed that offer updates under these names."""

    class Point(importlib.metadata.EntryPoint):
        def load(self) -> object:
            return dict(offered)[self.name]

    points = [Point(name, f"package{i}:{name}", "dprlhf.updates") for i, (name, _) in
              enumerate(offered)]  # fmt: skip
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: points if group == "dprlhf.updates" else [],
    )


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> UpdatePlugin:
    made = UpdatePlugin(Halved, halved)
    install(monkeypatch, ("halved", made))
    return made


def test_its_own_settings_class_validates_it(plugin: UpdatePlugin, tmp_path: Path) -> None:
    recipe = least(update={"name": "halved", "factor": 0.25})
    assert recipe.update == Halved(factor=0.25)
    assert find_update(recipe.update) is halved
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert yaml.safe_load(file.read_text())["update"]["factor"] == 0.25
    assert load_recipe(file) == recipe
    with pytest.raises(DprlhfError, match=r"update\.factor: Input should be greater than 0, not 0"):
        least(update={"name": "halved", "factor": 0})
    with pytest.raises(DprlhfError, match=r"unknown key 'update\.fctor'"):
        least(update={"name": "halved", "fctor": 1})


def test_one_that_is_not_installed_is_named(plugin: UpdatePlugin) -> None:
    with pytest.raises(DprlhfError, match="'npg', 'halved', not 'halvd'; did you mean 'halved'"):
        least(update={"name": "halvd"})


def test_what_is_no_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("halved", halved), ("pg", UpdatePlugin(Halved, halved)))
    with pytest.raises(DprlhfError, match=r"no dprlhf\.recipe\.UpdatePlugin"):
        least(update={"name": "halved"})
    assert find_update(least().update) is policy_gradient  # nobody replaces a built-in one
    same = UpdatePlugin(Halved, halved)
    install(monkeypatch, ("halved", same), ("halved", same))
    with pytest.raises(DprlhfError, match="several packages offer the update plugin 'halved'"):
        least(update={"name": "halved"})


@pytest.mark.slow
def test_a_run_is_charged_and_stated_as_any_other(plugin: UpdatePlugin, tmp_path: Path) -> None:
    model = save_sharp(tmp_path / "model")
    run = tmp_path / "run"
    result = train(model, run, epsilon=8.0, rounds=2, update__name="halved")
    kinds = [entry.kind for entry in read_ledger(run / "ledger.jsonl")]
    assert kinds[1:] == ["charge", "commit"] * 2
    card = json.loads((run / "privacy.json").read_text())
    assert card["released"][0].startswith(
        "the noised mean vector that the update halved takes from each user, 1 in each round"
    )
    assert card["epsilon"] == result.plan.guarantee.epsilon <= 8.0
    assert "by the update `halved`" in (run / "policy" / "README.md").read_text()


@pytest.mark.slow
def test_releases_of_the_settings_are_what_is_charged(plugin: UpdatePlugin, tmp_path: Path) -> None:
    model = save_sharp(tmp_path / "model")
    common = {"epsilon": 8.0, "rounds": 2, "update__name": "halved"}
    one = train(model, tmp_path / "1", **common).plan
    three = train(model, tmp_path / "3", **common, update__inner=3).plan
    assert three.releases_per_round == 3
    assert three.noise_multiplier > one.noise_multiplier


@pytest.mark.parametrize(
    ("function", "message"),
    [(greedy, "charged before.*releases planned for a round: 1"), (ungated, "TypeError")],
)
def test_it_cannot_leave_out_the_gate(function, message, monkeypatch, tmp_path):
    install(monkeypatch, ("halved", UpdatePlugin(Halved, function)))
    run = tmp_path / "run"
    with pytest.raises(DprlhfError, match=message):
        train(save_sharp(tmp_path / "model"), run, epsilon=8.0, rounds=2, update__name="halved")
    assert not (run / "policy").exists()
