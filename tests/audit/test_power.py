"""An audit that can fail: it sees broken gates under every partition, and seldom a sound one."""

import dataclasses
import math
import secrets
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import binom

from dprlhf.audit import Audit, audit, audit_plan, judgement, one_run
from dprlhf.audit.canaries import AuditRecord, vector_run
from dprlhf.audit.guesses import advantage, fewest_right, noise_refuted, right_guesses, simulate
from dprlhf.audit.judgement import SENTENCES, SHARES, smallest_shortfall
from dprlhf.audit.watched_gate import Seen, _kept
from dprlhf.boundary import open_released
from dprlhf.policies import optimizers
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.recipe import AnyRecipe, DPORecipe, FeedbackRecipe, RewardRecipe, SFTRecipe
from helpers.broken_gates import BROKEN, SMALL, break_gate
from helpers.marks import slow

PARTITIONS = ("random-allocation", "fixed", "stream", "poisson")
# The noise of epsilon 8 and 1 at 8 rounds and delta 1e-5: a search for it takes seconds.
NOISE = {"random-allocation": (0.5, 1.6), "fixed": (0.6, 3.73), "stream": (0.6, 3.73)}
NOISE["poisson"] = (0.64, 1.9)


@cache
def plan_of(partition: Any, z: float, users: int = 568, releases: int = 1) -> Plan:
    disjoint = partition != "random-allocation"
    made = make_plan(
        users=users, rounds=8, delta=1e-5, noise_multiplier=z, releases_per_round=releases,
        partition="stream" if disjoint else partition,
    )  # fmt: skip
    if not disjoint:
        return made
    # The ε of poisson takes seconds, and no test here reads it.
    mechanism = dataclasses.replace(made.mechanism, partition=partition)
    return dataclasses.replace(made, mechanism=mechanism)


def audited(plan: Plan, **options: Any) -> Audit:
    return audit_plan(plan, secrets.token_bytes(32), **{"state": False, **options})


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("partition", [PARTITIONS[0], *map(slow, PARTITIONS[1:])])
def test_broken_noise_is_refuted(fault, partition, monkeypatch):
    break_gate(monkeypatch, fault)
    for z in NOISE[partition]:
        assert audited(plan_of(partition, z)).verdict == "refuted"


@pytest.mark.slow
@pytest.mark.parametrize("partition", PARTITIONS)
def test_sound_noise_is_not(partition: str) -> None:
    refuted = sum(not audited(plan_of(partition, NOISE[partition][0])).holds for _ in range(10))
    assert refuted <= 4  # 3% each; the chance of five is about 5e-6


@pytest.mark.parametrize("fault", SMALL.values(), ids=SMALL)
def test_small_faults_of_a_larger_audit_are_refuted(fault, monkeypatch):
    break_gate(monkeypatch, fault)
    plan = plan_of("fixed", 1.08, 1064)
    assert sum(not audited(plan).holds for _ in range(10)) >= 7


def test_the_same_noise_in_two_releases_of_a_round_is_refuted(monkeypatch):
    plan = plan_of("fixed", 2.0, releases=2)
    assert audited(plan, confidence=0.9999).holds
    break_gate(monkeypatch, BROKEN["the same in every round"])
    assert "the noise of two releases is correlated" in audited(plan).refuted_by


def test_bounds_come_near_the_claim() -> None:
    for partition, z, share in (("fixed", 1.08, 0.7), ("random-allocation", 0.757, 0.5)):
        found = audited(plan_of(partition, z, 4064), state=True, seed=1)
        assert share * found.epsilon <= found.bound <= 1.2 * found.epsilon
        assert found.bound_any <= found.bound


@pytest.mark.parametrize("partition", PARTITIONS)
def test_right_guesses_are_as_many_as_the_plan_allows_and_no_more(partition: str) -> None:
    """The share of right guesses is (1 + δ(0))/2, which is what the bound rests on."""
    from dprlhf.audit.guesses import log_likelihood_ratio

    plan = plan_of(partition, NOISE[partition][0])
    observed, noise, included, known = simulate(plan, 4000, np.random.default_rng(0))
    right = right_guesses(log_likelihood_ratio(observed + noise, plan, known), included)
    likely = (1 + advantage(plan.mechanism)) / 2
    assert right / len(included) == pytest.approx(likely, abs=4 * 0.5 / math.sqrt(4000))
    assert likely > 0.55


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_guesses_that_know_nothing_are_right_half_of_the_time(spread: float) -> None:
    random = np.random.default_rng(0)
    right = [
        right_guesses(spread * random.standard_normal(50), random.random(50) < 0.5)
        for _ in range(400)
    ]
    assert np.mean(right) == pytest.approx(25, abs=4 * math.sqrt(50 / 4 / 400))


def test_the_confidence_is_split_over_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("fixed", 1.08)

    def judged(share: float) -> set[str]:
        monkeypatch.setattr(
            judgement, "noise_tests", lambda draws: dict.fromkeys(SHARES, 0.03 * share)
        )
        return set(audited(plan).refuted_by) & set(SENTENCES.values())

    assert judged(0.41) == set()
    assert judged(0.39) == {SENTENCES["variance"]}
    assert judged(0.04) == set(SENTENCES.values())


def test_the_end_of_a_long_release_is_kept() -> None:
    noise = np.arange(2**17, dtype=np.float64)
    kept = _kept(noise)
    assert len(kept) == 2**16
    assert kept[[0, -1]].tolist() == [0, 2**17 - 1]
    assert _kept(noise[:100]) is not None
    assert len(_kept(noise[: 2**16])) == 2**16


def test_more_canaries_than_values_that_are_tested_are_all_guessed(monkeypatch):
    """The noise of a long release is tested on a part of it; each canary needs its own value."""
    monkeypatch.setattr("dprlhf.audit.watched_gate._KEPT", 200)
    found = audited(plan_of("fixed", 1.08), confidence=0.9999, state=True)
    assert (found.guesses, found.released) == (504, 8 * 200)
    seen = smallest_shortfall(8 * 200, 1e-4 * SHARES["variance"], 0.9)
    assert found.power["noise"] == pytest.approx(seen)
    assert found.right > 300
    assert found.holds


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("bands", [1, 3])
def test_what_the_guesses_would_see_of_one_gaussian_has_a_closed_form(adjacency, bands):
    """Noise of f times z lets a guess be right with probability Φ(1/(2fz)), or Φ(1/(fz))."""
    canaries, level, z = 10_000, 0.03 * judgement.GUESSES_SHARE, 0.6
    plan = make_plan(
        users=canaries, rounds=8, delta=1e-5, noise_multiplier=z, partition="stream",
        adjacency=adjacency, bands=bands,
    )  # fmt: skip
    shortfall = noise_refuted(canaries, plan, level, 0.9)
    assert shortfall is not None
    needed = fewest_right(canaries, plan, level)
    reach = 1.0 if adjacency == "replace-one" else 0.5

    def seen(shortfall: float) -> float:
        rate = ndtr(reach / ((1 - shortfall) * z))
        return float(binom.sf(needed - 1, canaries, rate))

    assert seen(shortfall) == pytest.approx(0.9, abs=1e-6)
    assert seen(0.9 * shortfall) < 0.85


@pytest.mark.slow
@pytest.mark.parametrize(("partition", "z"), [("random-allocation", 0.757), ("poisson", 0.64)])
def test_what_the_guesses_would_see_of_secret_rounds_is_no_less_than_stated(partition, z):
    """The accountant knows the best guess about one user exactly here, up to a little more."""
    canaries, level = 10_000, 0.03 * judgement.GUESSES_SHARE
    plan = plan_of(partition, z, canaries)
    shortfall = noise_refuted(canaries, plan, level, 0.9)
    assert shortfall is not None
    needed = fewest_right(canaries, plan, level)

    def seen(shortfall: float) -> float:
        rate = (1 + advantage(plan.mechanism.with_noise((1 - shortfall) * z))) / 2
        return float(binom.sf(needed - 1, canaries, rate))

    assert seen(shortfall) >= 0.9
    assert seen(0.85 * shortfall) < 0.9
    assert noise_refuted(2, plan, level, 0.9) is None  # two right guesses prove nothing


def test_a_claim_far_too_large_cannot_be_refuted() -> None:
    found = [audited(plan_of("fixed", 0.08, 120)) for _ in range(4)]
    assert not any(one.can_refute for one in found)
    # The tests of the noise refute 3% of sound gates: all four of them once in a million times.
    verdicts = {one.verdict for one in found}
    assert verdicts - {"refuted"} == {"cannot refute at this size"}


def test_no_guess_depends_on_who_is_in() -> None:
    """The scores of all canaries but one stay what they are if that one's coin falls otherwise."""
    plan = plan_of("random-allocation", 0.757)
    canaries = plan.users - one_run._PROBES - (plan.users - one_run._PROBES) % 8
    included = np.random.default_rng(0).random(canaries) < 0.5

    def scores(bits: Any, folder: Path) -> Any:
        folder.mkdir()
        signs = np.concatenate([np.where(bits, 1.0, np.nan), np.ones(plan.users - canaries)])
        return judgement.attack_scores(vector_run(plan, folder, bytes(32), signs), canaries)

    import tempfile

    other = included.copy()
    other[7] ^= True
    with tempfile.TemporaryDirectory() as at, pytest.MonkeyPatch.context() as patch:
        break_gate(patch, _fixed_noise)
        one, two = scores(included, Path(at) / "a"), scores(other, Path(at) / "b")
    assert one[7] != two[7]
    assert np.delete(one, 7) == pytest.approx(np.delete(two, 7), abs=1e-9)


def _fixed_noise(noise: torch.Tensor, t: int, kept: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(t).standard_normal(len(noise))) * 0.757


def record_of(plan: Plan, given: float, moved: float) -> AuditRecord:
    seen = [[Seen(np.full(9, given), np.full(9, 2.0), np.ones(9))] for _ in range(plan.rounds)]
    return AuditRecord(plan, seen, None, np.full((plan.rounds, 9), moved))


def test_a_canary_above_the_clip_norm_and_a_step_beside_the_gate_are_seen() -> None:
    plan = plan_of("fixed", 1.08)
    step = 2.0 * plan.clip_norm / plan.expected_batch_size
    assert judgement._broken_rules(record_of(plan, 1.0, step)) == []
    assert "1.1 times the clip norm" in judgement._broken_rules(record_of(plan, 1.1, step))[0]
    assert "not released" in judgement._broken_rules(record_of(plan, 1.0, 1.1 * step))[0]


def test_the_power_counts_what_telemetry_leaves_of_the_clip_norm() -> None:
    plan = plan_of("fixed", 1.08, 2000)
    whole, part = (one_run.power_of(plan, 2000, 10, "gradient", 0.97, move) for move in (1, 0.436))
    assert whole["noise"] == part["noise"]
    assert whole["guesses"] is not None
    assert part["guesses"] is not None
    assert 1 - part["guesses"] == pytest.approx(0.436 * (1 - whole["guesses"]), rel=1e-9)
    secret = plan_of("random-allocation", 0.757, 1064)
    whole, part = (one_run.power_of(secret, 1000, 10, "gradient", 0.97, m) for m in (1, 0.7))
    assert part["guesses"] > whole["guesses"] + 0.1  # type: ignore[operator]


PRIVACY = {"epsilon": 4.0, "delta": 1e-5, "partition": "stream"}
MODEL = {"model_name_or_path": "nowhere", "dtype": "float32"}


def stage_recipes(privacy: dict[str, Any]) -> dict[str, AnyRecipe]:
    common: dict[str, Any] = {"privacy": privacy, "rounds": 4}
    data = {"path": "nowhere"}
    labelled = {"path": "nowhere", "label_column": "stars", "user_column": "prompt"}
    return {
        "sft": SFTRecipe(policy=MODEL, data=data, **common),
        "pairs": RewardRecipe(policy=MODEL, data=data, **common),
        "dpo": DPORecipe(policy=MODEL, data=data, **common),
        "feedback": FeedbackRecipe(policy=MODEL, data=data, **common),
        "labels": RewardRecipe(policy=MODEL, data=labelled, labels=["x", "y", "z"], **common),
    }


@pytest.mark.parametrize("adjacency", ["zero-out", slow("replace-one")])
@pytest.mark.parametrize("stage", ["sft", "pairs", "labels", "dpo", "feedback"])
def test_supervised_stages_move_each_canary_where_the_attack_looks(stage, adjacency, tmp_path):
    """The negative control: without noise every guess is right."""
    recipe = stage_recipes(PRIVACY | {"epsilon": math.inf, "adjacency": adjacency})[stage]
    found = audit(recipe, tmp_path / "a", canaries=60, seed=0, quiet=True)
    assert found.right == found.guesses == 60
    assert (found.stage, found.holds) == (
        {"pairs": "reward", "labels": "reward"}.get(stage, stage),
        True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "pairs", "dpo", "feedback"])
def test_supervised_stages_are_refuted_where_their_gate_is_broken(stage, tmp_path, monkeypatch):
    recipe = stage_recipes(PRIVACY)[stage]
    sound = audit(recipe, tmp_path / "a", canaries=100, confidence=0.9999, quiet=True)
    assert sound.verdict == "consistent"
    break_gate(monkeypatch, BROKEN["halved"])
    assert audit(recipe, tmp_path / "b", canaries=100, quiet=True).verdict == "refuted"


def test_a_step_beside_the_gate_is_seen_through_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "open_released", lambda *given: 1.01 * open_released(*given))
    recipe = stage_recipes(PRIVACY)["sft"]
    found = audit(recipe, tmp_path / "a", canaries=40, confidence=0.9999, quiet=True)
    assert found.refuted_by == ("the policy moved by something that was not released",)


@pytest.mark.parametrize("partition", ["stream", slow("random-allocation")])
def test_correlated_noise_is_audited(partition: str, tmp_path: Path) -> None:
    recipe = stage_recipes(PRIVACY | {"bands": 3, "partition": partition})["sft"]
    found = audit(recipe, tmp_path / "a", canaries=300, seed=3, confidence=0.9999, quiet=True)
    assert found.verdict == "consistent"
    assert found.right > 0.6 * found.guesses  # 0.68 is expected, were the noise independent
