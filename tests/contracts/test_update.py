"""What every private update must do, whatever it asks of the users."""

import copy
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from dprlhf import recipe
from dprlhf.boundary import BoundedSum, Private, Released, open_private
from dprlhf.data.in_memory import InMemoryInputs, recipe_of
from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import ClippedSum
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import read_ledger
from dprlhf.runs.folder import RunFolder
from dprlhf.testing import check_update
from dprlhf.testing.update import TIGHT
from dprlhf.training.build import open_run
from dprlhf.training.reinforcement import Result
from dprlhf.training.run import Batch, Run
from dprlhf.updates import UPDATES, PrivateRound
from helpers import families, tiny
from helpers.marks import slow
from helpers.rounds import value_of
from helpers.runs import ADAPTER, save_sharp, train

LEARNS: dict[str, dict[str, Any]] = {
    "pg": {},
    "npg": {
        "rounds": 16,
        "learning_rate": 8.0,
        "optimizer__name": "sgd",
        "update__clip_norm": 0.5,  # features are small where B starts at zero
        "update__oracle": {"steps": 2, "step_size": 1.0, "target_bound": 4},
    },
}
"""With what the plainest update, and that furthest from it, learn in a few rounds without noise."""


FEW = ADAPTER | {"type": "ffa-lora", "rank": 1}
"""An adapter with few dimensions."""

SPECS: dict[str, Any] = {
    "pg": recipe.PG(),
    "pg, paired": recipe.PG(baseline="paired"),
    "grpo": recipe.GRPO(name="grpo"),
    "ppo": recipe.PPO(name="ppo", epochs=2),
    "rebel": recipe.REBEL(name="rebel", steps=2),
    "rebel, gauss-newton": recipe.REBEL(name="rebel", oracle=recipe.Oracle()),
    "npg": recipe.NPG(name="npg"),
    "npg, statistics": recipe.NPG(name="npg", oracle=recipe.Oracle(name="sufficient-statistics")),
    "npg, gain": recipe.NPG(name="npg", oracle=recipe.Oracle(steps=2, gain=16.0)),
}


def test_every_update_has_settings_for_this_contract() -> None:
    assert UPDATES.keys() == {spec.name for spec in SPECS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)  # their other forms have later rounds below
def test_an_update_keeps_the_shipped_contract(name: str) -> None:
    spec = SPECS[name]
    report = check_update(UPDATES[spec.name], spec, seed=list(SPECS).index(name))
    assert report.releases == spec.releases
    assert report.largest[TIGHT] > 0.1


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "update": [
        {f"update__{k}": v for k, v in spec.model_dump(exclude_unset=True).items()}
        | {"update__name": spec.name}
        for spec in SPECS.values()
    ],
    "clip": [{"update__clip_norm": 0.2}, {"update__clip_norm": 50.0}],
    "kl": [{"kl__beta": 0.0}, {"kl__beta": 0.2}],
    "adapter": [
        {"policy__adapter": ADAPTER},
        {"policy__adapter": FEW},
        {"policy__adapter": {"type": "full"}},
    ],
    "optimizer": [{"optimizer__name": n} for n in ("sgd", "adam")],
    "partition": [{"privacy__partition": n} for n in ("random-allocation", "fixed")],
    "bands": [{}, {"privacy__bands": 2}],
    "responses": [{"rollout__responses": 2}, {"rollout__responses": 4}],
    "base": [{"rollout__base_policy": n} for n in ("on-policy", "reference")],
    "subspace": [{}, {"update__subspace": {"rank": 2, "prompts": 4}}],
    "prompts": [{"data__max_prompts_per_user": n} for n in (1, 2)],
    "sampling": [{}, {"rollout__top_k": 9}],
    "truncated": [
        {},
        {"rollout__mask_truncated": True, "rollout__stop": [*map(chr, range(33, 127))]},
    ],
    "micro-batch": [{"update__batch_size": 2}, {"update__batch_size": 64}],
}
"""What changes a user's contribution: a setting at each of its levels."""

Row = tuple[int, ...]  # a level of each option


def settings_of(row: Row) -> dict[str, Any]:
    levels = [option[level] for option, level in zip(OPTIONS.values(), row, strict=True)]
    return {name: value for level in levels for name, value in level.items()}


def recipe_in(row: Row, model: str, sources: InMemoryInputs) -> recipe.Recipe | None:
    """Return the recipe with these levels; None where the options refuse one another."""
    given = {
        "model": model, "rounds": 2, "epsilon": 8.0, "data__user_column": "user",
        "data__max_prompt_tokens": 16, "rollout__max_new_tokens": 3, "rollout__batch_size": 8,
        "policy__attn_implementation": "eager", "evaluation__prompts": 2,
    }  # fmt: skip
    try:
        spec = recipe_of(None, (), given | settings_of(row), sources)
    except DprlhfError:
        return None
    # What a run refuses later: copies of other layers than LoRA's, and bands of several releases.
    adapter, update = spec.policy.adapter, spec.update
    copies = isinstance(update, recipe.PPO) and adapter.type not in ("lora", "ffa-lora")
    # A regression's statistics are of few dimensions.
    many = getattr(update.least_squares, "closed_form", False) and adapter != recipe.Adapter(**FEW)
    banded = update.releases > 1 and spec.privacy.bands > 1
    return None if copies or many or banded else spec


def covering(model: str) -> tuple[list[tuple[str, recipe.Recipe]], int]:
    """Return recipes in which every two levels meet that go together, and the number of pairs."""
    random, sources = np.random.default_rng(0), users_in_memory()
    sizes = [len(levels) for levels in OPTIONS.values()]
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }
    found, pairs = [], 0
    while missing:
        pair = min(missing)
        tried = []
        for _ in range(60):
            row = tuple(dict(pair).get(i, int(random.integers(n))) for i, n in enumerate(sizes))
            tried.append((missing & set(itertools.combinations(enumerate(row), 2)), row))
        missing.discard(pair)  # if none of these is a recipe, the two are refused together
        for met, row in sorted(tried, key=lambda one: -len(one[0])):
            if (spec := recipe_in(row, model, sources)) is not None:
                found.append((str(settings_of(row)), spec))
                pairs += len(met)
                missing -= met
                break
    return found, pairs


FAILING, BLANK = 4, (6, 7, 8, 9)
"""The user whose reward fails, and those without a prompt that can be read."""


def users_in_memory() -> InMemoryInputs:
    """Two prompts of each of ten users."""

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        if any(prompt.startswith("fail") for prompt in prompts):
            raise ValueError
        return [sum(map(ord, text)) % 101 / 50 for text in completions]  # hardly two are equal

    words = ["a b", "the quick", "x", "or", "fail", "of late", *[None] * len(BLANK)]
    rows = [
        {"prompt": text and f"{text} {i}"[:16], "user": f"user {number}"}
        for i in range(2)
        for number, text in enumerate(words)
    ]
    return InMemoryInputs(rows, reward, [f"public {'x' * i}" for i in range(8)])


@dataclass
class Moved:
    """A release's sum, and the norm of each user's contribution before clipping, by user."""

    total: torch.Tensor
    norms: dict[int, float]


class Rounds:
    """Rounds of an open run in which every release is the same noise, whoever the users are."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.start = self.state()

    def first(self, users: list[int]) -> None:
        """Run round 1 with these users from the start: it moves the adapter away from zero."""
        self.restore(self.start)
        self.sums_of(1, users)

    def sums_of(self, t: int, users: list[int]) -> list[Moved]:
        """Run round t with these users and return what it released."""
        moved: list[Moved] = []
        read = [user for user in users if user not in BLANK]
        whole = PrivateRound.release

        def release(round_: PrivateRound, clipped: ClippedSum) -> Released[torch.Tensor]:
            norms = open_private(clipped.norms).tolist()
            moved.append(Moved(clipped.bounded.total.clone(), dict(zip(read, norms, strict=True))))
            return whole(round_, clipped)

        def noise(bounded: BoundedSum) -> Released[torch.Tensor]:
            assert bounded.clip_norm == self.run.plan.clip_norm
            generator = torch.Generator().manual_seed(len(moved))
            made = torch.randn(bounded.total.shape, generator=generator, dtype=torch.float64)
            return Released(0.1 * self.run.plan.clip_norm * made, t)

        given = Private(np.array(users)), noise, mock.MagicMock(), lambda rows: None
        with mock.patch.object(PrivateRound, "release", release):
            self.run.stage.update(self.run, Batch(t, *given))
        return moved

    def state(self) -> Any:
        weights = [p.detach() for p in self.run.policy.parameters.values()]
        return copy.deepcopy((weights, self.run.optimizer.state_dict()))

    def restore(self, state: Any) -> None:
        weights, optimizer = copy.deepcopy(state)
        with torch.no_grad():
            for parameter, value in zip(self.run.policy.parameters.values(), weights, strict=True):
                parameter.copy_(value)
        self.run.optimizer.load_state_dict(optimizer)


SILENT = "a user alone contributes nothing"
"""Whose responses are all truncated and masked, or get equal rewards, as seldom happens."""


def faults_of_later_round(rounds: Rounds) -> set[str]:
    """Return what is wrong where data are blank: of user 1, and of all but user 1."""
    users = [0, 1, 2, FAILING, 5]
    without, alone = [0, BLANK[0], 2, FAILING, 5], [BLANK[0], 1, *BLANK[1:]]
    rounds.first(users)
    later = rounds.state()
    found = {}
    for name, chosen in {"whole": users, "without": without, "alone": alone}.items():
        rounds.restore(later)
        found[name] = rounds.sums_of(2, chosen)
    rounds.first([0, 3, BLANK[0], BLANK[1], 5])
    after_others = rounds.sums_of(2, users)
    faults = set()
    bound, eps = rounds.run.plan.clip_norm, 8 * torch.finfo(torch.float64).eps
    for whole, without, own, again in zip(*found.values(), after_others, strict=True):
        parts = whole.total.abs() + without.total.abs() + own.total.abs()
        apart = (whole.total - without.total - own.total).abs()
        here = {
            "one user moves a sum by more than S": float((whole.total - without.total).norm())
            > bound * (1 + 1e-9),
            "another user's contribution changes": bool(apart.max() > eps * parts.max())
            or (without.norms | own.norms).items() - whole.norms.items() != set(),
            "a round depends on the users of the one before": whole.norms != again.norms
            or not torch.equal(whole.total, again.total),
        }
        faults |= {fault for fault, is_so in here.items() if is_so}
    if not any(bool(own.total.any()) for own in found["alone"]):
        faults.add(SILENT)
    return faults


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.model(layers=1).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def recipes(tiny_model: str) -> list[tuple[str, recipe.Recipe]]:
    return covering(tiny_model)[0]


def faults_of(spec: recipe.Recipe, folder: RunFolder) -> set[str]:
    """Return what is wrong in the second round of a recipe's run."""
    with open_run(spec, folder, users_in_memory(), create=True, quiet=True, counted=False) as run:
        return faults_of_later_round(Rounds(run))


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
def test_a_later_round_moves_by_each_user_alone_whatever_the_options(
    update: str,
    recipes: list[tuple[str, recipe.Recipe]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every two settings that go together meet in a recipe, and the adapter is away from zero.

    To the bit: the norm of each user's contribution before clipping, with a neighbour and without;
    and norms and sums of a round after other users had the round before, which released the same.
    To the rounding of a float64 sum, 10⁸ times finer than a float32 contribution: that a sum is
    that of the others and the user's own.
    """
    # That rows keep apart on this machine has tests of its own.
    monkeypatch.setattr("dprlhf.training.build.check_layout", lambda *given: "")
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    faults = {}
    for number, (options, spec) in enumerate(recipes):
        if spec.update.name == update:
            faults[options] = faults_of(spec, RunFolder(tmp_path / str(number)))
    assert sum(SILENT in of_recipe for of_recipe in faults.values()) < len(faults) / 3
    assert not (wrong := [(f - {SILENT}, at) for at, f in faults.items() if f - {SILENT}]), wrong


@pytest.mark.parametrize(
    "options",
    [
        {"update__name": "pg", "kl__beta": 0.2, "data__max_prompts_per_user": 2},
        slow({"update__name": "grpo", "update__batch_size": 2, "rollout__responses": 4}),
        slow({"update__name": "ppo", "rollout__base_policy": "reference"}),
        slow({"update__name": "rebel", "kl__beta": 0.2}),
    ],
    ids=lambda options: options["update__name"],
)
def test_experts_get_the_rows_of_one_user_in_a_pass(options, tmp_path, monkeypatch):
    """Experts that add the mean over all rows of a pass move no other user's contribution."""
    tiny.tokenizer().save_pretrained(tmp_path)
    families.model("mixtral").save_pretrained(tmp_path)
    experts = MixtralSparseMoeBlock.forward

    def coupled(block: Any, x: torch.Tensor) -> torch.Tensor:
        return experts(block, x) + x.mean((0, 1))

    monkeypatch.setattr(MixtralSparseMoeBlock, "forward", coupled)
    monkeypatch.setattr("dprlhf.training.made_up_rounds._check_padding", lambda *given: None)
    monkeypatch.setattr("dprlhf.training.made_up_rounds.check_padding", lambda *given: None)
    given = {
        "model": str(tmp_path), "rounds": 2, "epsilon": 8.0, "data__user_column": "user",
        "data__max_prompt_tokens": 16, "rollout__max_new_tokens": 3,
        "policy__adapter": {"type": "lora", "rank": 2, "target_modules": ["q_proj"]},
    }  # fmt: skip
    spec = recipe_of(None, (), given | options, users_in_memory())
    assert faults_of(spec, RunFolder(tmp_path / "run")) == set()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_sharp(tmp_path_factory.mktemp("model"))


def check_ledger(result: Result, releases: int) -> None:
    """One charge a round, for all of its releases."""
    assert result.plan.releases_per_round == releases
    entries = read_ledger(result.folder.path / "ledger.jsonl")
    assert [e.kind for e in entries][1:] == ["charge", "commit"] * result.plan.rounds
    assert {e.body["releases_per_round"] for e in entries if e.kind == "charge"} == {releases}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_a_run_without_noise_learns(model: str, tmp_path: Path, name: str) -> None:
    fixed = {"rounds": 20, "learning_rate": 0.1, "update__name": name}
    result = train(
        model, tmp_path / "run", epsilon=math.inf, rollout__responses=4,
        evaluation_prompts=[f"public {i}" for i in range(240)], **fixed | LEARNS[name],
    )  # fmt: skip
    assert result.difference.mean > 4 * result.difference.standard_error
    check_ledger(result, result.plan.releases_per_round)
    card = json.loads((tmp_path / "run/privacy.json").read_text())
    assert card["private"] is False
    assert card["epsilon"] == "infinity"


@pytest.mark.parametrize("name", [n if n in UPDATES else slow(n) for n in SPECS])
def test_a_private_run(model, tmp_path, monkeypatch, name):
    """Every release is a sum clipped to S, and noise of standard deviation zS, over m."""
    spec, noise = SPECS[name], []
    release = Gate.release

    def seen(self: Gate, number: int, bounded: BoundedSum) -> Released[torch.Tensor]:
        assert bounded.clip_norm == 0.2
        total = bounded.total.clone()
        released = release(self, number, bounded)
        noise.append(value_of(released) * self.plan.expected_batch_size - total)
        return released

    monkeypatch.setattr(Gate, "release", seen)
    given = {f"update__{k}": v for k, v in spec.model_dump(exclude_unset=True).items()}
    result = train(
        model, tmp_path / "run", epsilon=8.0, rounds=2, optimizer__name="sgd", rollout__responses=4,
        rollout__base_policy="reference", **given | {"update__clip_norm": 0.2}, policy__adapter=FEW,
    )  # fmt: skip
    check_ledger(result, spec.releases)
    assert len(noise) == 2 * spec.releases
    assert result.plan.noise_multiplier > 0.1
    normals = torch.cat(noise) / (result.plan.noise_multiplier * 0.2)
    assert float(normals.square().mean()) == pytest.approx(1, abs=5 * math.sqrt(2 / len(normals)))
    assert float(normals.mean()) == pytest.approx(0, abs=5 / math.sqrt(len(normals)))
