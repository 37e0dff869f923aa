"""The clip norm that follows a quantile: what a user adds, what it costs, where it goes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.boundary import BoundedSum, Private, Released
from dprlhf.gradients.clipping import clipped_vectors
from dprlhf.privacy.gate import Gate
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.training import reinforcement
from dprlhf.updates import UPDATES
from dprlhf.updates.adaptive_clip import AdaptiveClip
from dprlhf.updates.round import Terms
from dprlhf.updates.telemetry import TelemetryCoordinates
from helpers.autograd import gradient_of_user, relative_error
from helpers.batches import Shape, batch_of
from helpers.policies import policy_of
from helpers.recipes import recipe_settings, refusal
from helpers.rounds import round_of, some_users, value_of
from helpers.runs import lower_case, save_sharp, train

R, S = 3.0, 0.5
SHAPE = Shape([[5, 1], [2], [18], [7]], k=2, length=4)
SPEC = recipe.QuantileClip(quantile=0.5, initial=S, step_size=0.3, share=0.1)
PG, PPO = (
    recipe.make_recipe(recipe_settings(update={"batch_size": 6, **update})).update
    for update in ({"name": "pg"}, {"name": "ppo", "local_learning_rate": 1.0})
)


def scores_of(responses: Responses, spread: float = 1.0) -> Scores:
    values = np.random.default_rng(1).uniform(-R, R, len(responses.user))
    values *= np.array([0.02, 1.0, 0.3, 1.0])[responses.user] * spread
    return Scores(values, np.ones(len(values), dtype=bool), {})


def clip_of(factor: float = 1.0) -> AdaptiveClip:
    clip = AdaptiveClip(SPEC, S)
    clip.factor = factor
    return clip


def run_round(
    responses: Responses, scores: Scores, clip: AdaptiveClip | None, gate: Any = None
) -> tuple[Any, Any]:
    round_, gate = round_of(
        policy_of("gpt2", "lora"),
        responses,
        scores,
        clip_norm=S,
        telemetry=TelemetryCoordinates(0.1, R),
        gate=gate,
        expected_batch_size=4.0,
    )
    round_.clip = clip
    return round_, gate


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_the_sum_and_the_release_from_scratch(factor: float) -> None:
    responses = batch_of(SHAPE, 10)
    scores = scores_of(responses)
    scores.valid[np.flatnonzero(responses.user == 1)[0]] = False
    clip, policy = clip_of(factor), policy_of("gpt2", "lora")
    round_, gate = run_round(responses, scores, clip)
    steps: list[Any] = []
    round_.step = steps.append
    UPDATES["pg"](round_, PG)

    bound = math.sqrt(S**2 * (1 - SPEC.share) - 0.1**2)
    weights = np.zeros(len(responses.user))
    for row, user in enumerate(responses.user):
        other = row + 1 - 2 * (row % 2)
        weights[row] = (scores.values[row] - scores.values[other]) / (responses.user == user).sum()
    expected, unclipped = torch.zeros(policy.dimension, dtype=torch.float64), []
    for user in (0, 2, 3):
        scaled = factor * gradient_of_user(policy, responses, weights, user)
        unclipped.append(float(scaled.norm()) <= bound)
        expected += scaled * min(1.0, bound / max(float(scaled.norm()), 1e-300))
    total = gate.sums[0].total
    assert relative_error(total[: policy.dimension], expected) < 1e-8
    count = sum(1 if inside else -1 for inside in unclipped)
    assert float(total[-1]) == pytest.approx(math.sqrt(SPEC.share) * S * count, rel=1e-8, abs=1e-9)
    # The policy moves along the mean of the users' own gradients, clipped at S/a.
    assert relative_error(value_of(steps[0]), expected / 4 / factor) < 1e-8
    share = min(max(0.5 + count / 4 / 2, 0), 1)
    assert clip.unclipped == pytest.approx(share, rel=1e-7)
    assert clip.factor == pytest.approx(factor * math.exp(0.3 * (share - 0.5)), rel=1e-7)
    if factor == 1:
        assert 0 < sum(unclipped) < 3


@pytest.mark.parametrize("name", ["pg", "ppo"])
@pytest.mark.parametrize("factor", [1e-3, 0.5, 1.0, 3.0, 1e4])
def test_one_user_moves_the_joint_sum_by_the_clip_norm_at_most(name: str, factor: float) -> None:
    responses = batch_of(SHAPE, seed=9)
    scores = scores_of(responses, spread=3.0)
    sums = {}
    for left_out in (None, *range(4)):
        kept = [user for user in range(4) if user != left_out]
        round_, gate = run_round(*some_users(responses, scores, kept), clip_of(factor))
        UPDATES[name](round_, PG if name == "pg" else PPO)
        assert gate.sums[0].clip_norm == S
        sums[left_out] = gate.sums[0].total
    moved = [float((sums[None] - sums[user]).norm()) for user in range(4)]
    assert max(moved) <= S
    assert min(moved) > math.sqrt(SPEC.share) * S * 0.99  # the count alone
    if factor > 1:
        assert max(moved) > 0.9 * S


def test_a_user_with_broken_scores_or_without_rows_is_not_counted() -> None:
    clip = clip_of()
    user, valid = np.array([0, 0, 1, 3]), np.array([True, False, True, True])
    found = clip.of_users(user, np.zeros(4), valid)[:, 0]
    np.testing.assert_allclose(found, [-clip.norm, 0, 0, -clip.norm])


def test_the_factor_follows_released_values_alone() -> None:
    """Two rounds with other users, and the same release: the same factor, and no bit of a norm."""
    found, counts = [], []

    def gate(bounded: BoundedSum) -> Released[torch.Tensor]:
        counts.append(float(bounded.total[-1]) / clip.norm)
        return Released(torch.full_like(bounded.total, 0.25 * clip.norm), 1)

    responses = batch_of(SHAPE, seed=9)
    for spread in (0.01, 1.0):
        clip = clip_of(0.7)
        round_, _ = run_round(responses, scores_of(responses, spread), clip, gate)
        UPDATES["pg"](round_, PG)
        found.append((clip.factor, clip.unclipped))
    assert counts[0] == pytest.approx(4, rel=1e-7)
    assert counts[1] < 3
    assert found[0] == found[1]
    assert found[0] == pytest.approx((0.7 * math.exp(0.3 * 0.125), 0.625))


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_vectors_that_are_moves_are_scaled_and_the_release_scaled_back(factor: float) -> None:
    responses = batch_of(SHAPE, seed=9)
    found = []
    for clip, bound in ((clip_of(factor), S), (None, S / factor)):
        round_, _ = run_round(responses, scores_of(responses), clip)
        if clip is None:  # the same round with the clip norm of the other's own unit
            share = math.sqrt(1 - (SPEC.share + (0.1 / S) ** 2))
            round_.plan = Terms(bound * share, 0.0, 4.0, users=1000)
            round_.telemetry = TelemetryCoordinates(0.0, R)
        steps: list[Any] = []
        round_.step = steps.append
        UPDATES["ppo"](round_, PPO)
        found.append(value_of(steps[0]))
    assert relative_error(found[0], found[1]) < 1e-6


def test_the_factor_of_a_round_does_not_depend_on_its_users() -> None:
    """A user's part of the gradient is the same whoever else is there, and however large."""
    responses = batch_of(SHAPE, seed=9)
    parts = []
    for spread in (1.0, 50.0):
        scores = scores_of(responses)
        scores.values[responses.user == 3] *= spread
        sums = []
        for kept in ([0, 3], [3]):
            round_, gate = run_round(*some_users(responses, scores, kept), clip_of(0.7))
            UPDATES["pg"](round_, PG)
            sums.append(gate.sums[0].total)
        parts.append(sums[0] - sums[1])
    torch.testing.assert_close(parts[0], parts[1], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.9])
def test_the_clip_norm_finds_the_quantile_under_noise(quantile: float) -> None:
    random = np.random.default_rng(0)
    spec = recipe.QuantileClip(quantile=quantile, initial=0.1, step_size=0.3, share=0.05)
    clip, z, m = AdaptiveClip(spec, 0.1), 2.0, 200
    bound, seen = 0.1 * math.sqrt(1 - spec.share), []
    for t in range(1, 201):
        norms = random.lognormal(1.0, 0.5, m)
        vectors = torch.from_numpy(clip.factor * norms)[:, None]
        clipped = clipped_vectors(
            Private([(np.arange(m), vectors)]),
            1,
            extra=Private(clip.of_users(np.arange(m), np.zeros(m), np.ones(m, dtype=bool))),
            extra_norm=clip.norm,
            clip_norm=0.1,
            reduce=lambda x: x,
            signed=True,
        )
        noised = clipped.bounded.total[1:] + 0.1 * z * random.standard_normal()
        clip.read(Released(noised / m, 1), t)
        seen.append(bound / clip.factor)
    reached = np.random.default_rng(1).lognormal(1.0, 0.5, 100_000) <= np.exp(
        np.log(seen[100:]).mean()
    )
    assert reached.mean() == pytest.approx(quantile, abs=0.04)


def test_the_gate_alone_gives_the_count() -> None:
    with pytest.raises(TypeError, match="the clip norm"):
        clip_of().read(torch.zeros(1), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update": {"name": "npg"}, "optimizer": {"name": "sgd"}}, "features of a regression"),
        ({"update": {"name": "rebel"}, "optimizer": {"name": "sgd"}}, "features of a regression"),
        ({"privacy": {"epsilon": 1.0, "partition": "fixed", "bands": 2}}, "take back noise"),
        ({"update": {"clip_norm": {"quantile": 0.5, "share": 0.99}}}, "leave nothing"),
        ({"update": {"clip_norm": {"quantile": 1.5}}}, "update.clip_norm.quantile"),
        ({"update": {"clip_norm": {"quantile": 0.5, "alpha": 1}}}, "update.clip_norm.alpha"),
    ],
)
def test_where_it_does_not_fit_it_is_refused(changes: dict[str, Any], said: str) -> None:
    update = {"name": "pg", "clip_norm": {"quantile": 0.5}, **changes.pop("update", {})}
    assert said in refusal(recipe_settings(update=update, **changes))


@pytest.mark.slow
def test_a_run_follows_the_norms_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {
        "epsilon": 100.0, "rounds": 4, "learning_rate": 0.05, "evaluation_prompts": None,
        "prompts": [f"user {i} says" for i in range(40)], "rollout__max_new_tokens": 3,
        "update__clip_norm": {"quantile": 0.5, "initial": 0.001, "share": 0.5},
        "optimizer__name": "adam-corrected",
    }  # fmt: skip
    noises: list[float] = []
    given = reinforcement.set_noise

    def noised(optimizer: Any, noise_std: float) -> None:
        noises.append(noise_std)
        given(optimizer, noise_std)

    model = save_sharp(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(reinforcement, "set_noise", noised)
        whole = train(model, tmp_path / "whole", **common)
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").open()]
    norms = [line["clip_norm"] for line in lines]
    assert norms[-1] > 0.001  # nearly all users are clipped, so the clip norm rises
    plan, before = whole.plan, [0.001, *norms[:3]]
    expected = [plan.noise_multiplier * c / plan.expected_batch_size for c in before]
    assert noises == pytest.approx(expected)
    assert all(0 <= line["unclipped_share_noised"] <= 1 for line in lines)
    release = Gate.release

    def crash(self: Any, round_: int, bounded: Any) -> Any:
        if round_ == 3:
            raise MemoryError("crash")
        return release(self, round_, bounded)

    with monkeypatch.context() as patch:
        patch.setattr(Gate, "release", crash)
        with pytest.raises(DprlhfError, match="resume"):
            train(model, tmp_path / "run", **common)
    dprlhf.resume(tmp_path / "run", prompts=common["prompts"], reward=lower_case, quiet=True)
    for file in ("policy", "clip", "optimizer"):
        one, other = (
            load_file(tmp_path / run / f"checkpoint/{file}.safetensors") for run in ("whole", "run")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
