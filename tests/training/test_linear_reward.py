"""A reward from logged feedback: users' contributions against plain means, and whole runs."""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.errors import InterruptedRunError
from dprlhf.gradients.clipping import clip_users
from dprlhf.policies.loading import make_policy
from dprlhf.privacy.ledger import read_ledger
from dprlhf.training import linear_reward
from dprlhf.training.feedback import Reactions
from dprlhf.training.guidance import Guidance
from dprlhf.training.linear_reward import (
    ByReward,
    Features,
    contributions,
    fit_features,
    mean_states,
)
from helpers import families, runs, tiny
from helpers.stages import DATA, ROWS, examples, logs, stage_of, stage_of_logs, wide_policy

SPEC = stage_of(recipe.FeedbackRecipe, data=DATA, update={"baseline": 0.125, "reward_range": 0.5})


def state_of(trained: Any, row: dict[str, Any]) -> torch.Tensor:
    """Return a completion's mean state under the base model, from a pass over its row alone."""
    before, own = (trained.tokenizer(row[k])["input_ids"] for k in ("prompt", "completion"))
    seen: list[torch.Tensor] = []
    layers = trained.network.transformer.h
    hook = layers[2 * len(layers) // 3].register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    with torch.no_grad(), trained.base():
        trained.model(input_ids=torch.tensor([before + own]))
    hook.remove()
    return seen[0][0, len(before) - 1 :].mean(0)  # of each token and the end that follows


def features_of(size: int) -> Features:
    drawn = torch.randn(40, size, generator=torch.Generator().manual_seed(4)).double()
    return fit_features(drawn, 1.0)


def sums_of(rows: list[dict[str, Any]], batch_size: int = 4, scale: float = 0.3) -> torch.Tensor:
    trained = wide_policy(scale)
    encoded = Reactions(SPEC).encode(trained, examples(rows, SPEC.data))
    size = trained.model.get_input_embeddings().weight.shape[1]
    update = SPEC.update.model_copy(update={"batch_size": batch_size})
    return contributions(features_of(size), trained, encoded, update)


def test_a_user_contributes_the_mean_of_its_feedback_times_its_features() -> None:
    """With an adapter off its start, which has no part in it."""
    trained = wide_policy(0.3)
    states = {row["completion"]: state_of(trained, row) for row in ROWS}
    features = features_of(len(states["good"]))
    for user, found in zip("abc", sums_of(ROWS), strict=True):
        own = [row for row in ROWS if row["user"] == user]
        counts = [min(max((row["label"] - 0.125) / 0.5, -1.0), 1.0) for row in own]
        seen = torch.stack([(states[row["completion"]] - features.mean) for row in own])
        of_rows = features.subspace.scale * (seen / features.std) @ features.subspace.directions.T
        expected = (torch.tensor(counts).double()[:, None] * of_rows).mean(0)
        assert float((found - expected).norm()) < 1e-9 * float(expected.norm())


def test_nobody_else_and_no_micro_batch_moves_a_users_contribution() -> None:
    """Also after the adapter has moved: the features are those of the base model."""
    whole = sums_of(ROWS)
    others = [r if r["user"] == "b" else {**r, "completion": "zzz", "label": -1.0} for r in ROWS]
    assert torch.equal(sums_of(others)[1], whole[1])
    assert not torch.equal(sums_of(others)[0], whole[0])
    assert torch.allclose(sums_of(ROWS, batch_size=1), whole, rtol=1e-9)
    assert torch.equal(sums_of(ROWS, scale=0.0), whole)


@pytest.mark.parametrize("user", ["a", "b", "c"])
def test_one_user_fewer_moves_the_sum_by_the_clip_norm_at_most(user: str) -> None:
    totals = []
    for rows in (ROWS, [row for row in ROWS if row["user"] != user]):
        clipped, _ = clip_users(sums_of(rows), 1e-3, most_users=3)
        totals.append(clipped.sum(0))
    assert 0.9e-3 < float((totals[0] - totals[1]).norm()) <= 1e-3


def plan_of(users: float, noise_std: float) -> Any:
    """Return what the estimate reads of a plan, with a noise of that size on the released mean."""
    return SimpleNamespace(
        clip_norm=1.0, expected_batch_size=users, noise_std_of=lambda _: users * noise_std
    )


_MIXED = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(7)).double()).Q


def of_widths(count: int, rng: torch.Generator) -> torch.Tensor:
    """Return states that vary much more along some directions than along others."""
    widths = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.2, 0.1]).double()
    return torch.randn(count, 6, generator=rng).double() * widths @ _MIXED


def test_what_is_liked_is_recovered_from_the_mean_and_the_noise_is_allowed_for() -> None:
    """Without noise all of it; with noise more than by the discriminant C⁻¹ b of a known C."""
    rng = torch.Generator().manual_seed(5)
    fitted, states = fit_features(of_widths(400, rng), 1.0), of_widths(4000, rng)
    truth = torch.tensor([0.1, -0.4, 0.5, 1.5, 0.0, 0.0]).double()
    values, seen = states @ _MIXED.T @ truth, fitted.coordinates(states)
    clipped, _ = clip_users(seen, 1.0)
    mean = (values.sign()[:, None] * clipped).mean(0)

    def correlation(weights: torch.Tensor) -> float:
        return float(torch.corrcoef(torch.stack([seen @ weights, values]))[0, 1])

    assert correlation(fitted.weights(mean, plan_of(4000, 0.0))) > 0.97
    moment = fitted.public.T @ fitted.public / len(fitted.public)
    gains = []
    for _ in range(40):
        noised = mean + 0.1 * torch.randn(len(mean), generator=rng).double()
        posterior = fitted.weights(noised, plan_of(300, 0.1))
        gains.append(correlation(posterior) - correlation(torch.linalg.solve(moment, noised)))
    assert np.mean(gains) > 3 * np.std(gains) / math.sqrt(len(gains))


def test_weights_are_the_posterior_mean_of_a_normal_prior() -> None:
    """Against a regression of drawn weights on the means that follow from them."""
    rng = torch.Generator().manual_seed(6)
    fitted = fit_features(of_widths(500, rng), 1.0)
    seen, plan = fitted.public, plan_of(200, 0.05)
    clipped, _ = clip_users(seen, 1.0)
    root = torch.linalg.cholesky(torch.linalg.inv(seen.T @ seen / len(seen)) * 0.03 / 6)
    drawn = torch.randn(100_000, 6, generator=rng).double() @ root.T
    spread = torch.linalg.cholesky(clipped.T @ clipped / len(seen) / 200)
    noise = [torch.randn(100_000, 6, generator=rng).double() for _ in range(2)]
    means = drawn @ (clipped.T @ seen / len(seen)).T + noise[0] @ spread.T + 0.05 * noise[1]
    fitted_weights = torch.linalg.lstsq(means, drawn).solution
    for released in torch.eye(6).double():
        found = fitted.weights(released, plan)
        assert float((found - released @ fitted_weights).norm()) < 0.05 * float(found.norm())


def test_a_release_that_says_nothing_is_told_from_one_that_does() -> None:
    """Of labels in a random order p-values below 5% are as rare, with noise and without."""
    rng = torch.Generator().manual_seed(9)
    fitted = fit_features(of_widths(400, rng), 1.0)
    for noise_std in (0.0, 0.02):
        chances: dict[str, list[float]] = {"unrelated": [], "related": []}
        for _ in range(200):
            states = of_widths(300, rng)
            clipped, _ = clip_users(fitted.coordinates(states), 1.0)
            likes = (states @ _MIXED.T)[:, 1].sign()
            for name, counts in (("unrelated", likes[torch.randperm(300)]), ("related", likes)):
                noise = noise_std * torch.randn(6, generator=rng).double()
                mean = (counts[:, None] * clipped).mean(0) + noise
                chances[name].append(fitted.p_value(mean, plan_of(300, noise_std)))
        assert 0.01 < np.mean(np.array(chances["unrelated"]) < 0.05) < 0.1
        assert 0.4 < np.mean(chances["unrelated"]) < 0.6
        assert max(chances["related"]) < 1e-4


REWARD = {"loss_type": "linear_reward", "subspace": {"rank": 4, "prompts": 12, "target_kl": 5.0}}
PUBLIC = [row | {"prompt": f"it was {'ab'[i % 2]}"} for i, row in enumerate(logs(100, 20))]


def run_of(model: str, folder: Any, public: Any = PUBLIC, rows: Any = None, **changes: Any) -> Any:
    given = {
        "update": REWARD, "rounds": 1, "optimizer": {"name": "normalized-sgd", "learning_rate": 2},
        "evaluation": {"data": {"path": "in-memory"}, "prompts": 4, "declared_public": True},
    } | changes  # fmt: skip
    spec = stage_of_logs(model, folder, **given)
    rows = rows or logs(0, 40)
    return dprlhf.train_stage(spec, data=rows, evaluation_data=public, quiet=True)


@pytest.mark.slow
def test_a_policy_learns_what_is_liked_from_one_release(tmp_path, monkeypatch):
    model = str(runs.save_sharp(tmp_path / "model"))
    free = {"privacy": {"epsilon": math.inf}}
    run = run_of(model, tmp_path / "free", **free)
    assert run.after["loss"].mean < run.before["loss"].mean - 0.005
    turned = [{**row, "label": not row["label"]} for row in logs(0, 40)]
    other = run_of(model, tmp_path / "turned", rows=turned, **free)
    assert other.after["loss"].mean > run.before["loss"].mean + 0.005


@pytest.mark.slow
def test_a_run_charges_one_release_and_reads_prompts_alone_of_public_rows(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    run = run_of(model, tmp_path / "run")
    assert len([e for e in read_ledger(tmp_path / "run/ledger.jsonl") if e.kind == "charge"]) == 1
    one = stage_of_logs(model, tmp_path / "one", rounds=1)
    plain = dprlhf.train_stage(one, data=logs(0, 40), quiet=True)
    assert run.plan.guarantee == plain.plan.guarantee
    card = json.loads((tmp_path / "run/privacy.json").read_text())
    assert "feedback times the main coordinates" in card["released"][0]
    other = [row | {"completion": " qqq", "label": i < 3} for i, row in enumerate(PUBLIC)]
    run_of(model, tmp_path / "other", public=other)
    files = [tmp_path / n / "policy/adapter_model.safetensors" for n in ("run", "other")]
    weights = [load_file(file) for file in files]
    assert any(bool(w.any()) for name, w in weights[0].items() if "lora_B" in name)
    assert all(torch.equal(w, weights[1][name]) for name, w in weights[0].items())


@pytest.mark.slow
def test_each_step_has_its_share_of_the_target_and_of_the_estimate(model, tmp_path, monkeypatch):
    shares: list[int | None] = []
    limited = Guidance.trust_region

    def seen(*given: Any, steps: int | None = None) -> Any:
        shares.append(steps)
        return limited(*given, steps=steps)

    monkeypatch.setattr(Guidance, "trust_region", seen)
    clock = iter(range(10**9))
    monkeypatch.setattr(linear_reward.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(linear_reward, "_FITTED", 15)
    estimates: list[float | None] = []
    real = ByReward.seconds_a_round
    monkeypatch.setattr(
        ByReward, "seconds_a_round", lambda *given: estimates.append(real(*given)) or estimates[-1]
    )
    run_of(model, tmp_path / "run")
    assert shares == [8] * 8
    # A second each for sampling, states and gradients of 4 responses to 16 prompts; steps have 12,
    # and 16 for their length; the features have 15.
    a_row = 1 / 64
    logged = 40 * SPEC.data.model_copy(update={"max_prompts_per_user": 4}).prompts_in_round
    expected = 8 * (12 * 4 + 16) * 3 * a_row + (15 * 4 + logged) * 2 * a_row
    assert estimates == [pytest.approx(expected)]


def test_coordinates_are_brought_near_one_size() -> None:
    states = of_widths(500, torch.Generator().manual_seed(8))
    states[:, 0] *= 1e-3 + states[:, 1].abs()  # standardising alone does not make them alike
    fitted = fit_features(states, 1.0)
    rows = fitted.subspace.directions
    unit = rows / rows.norm(dim=1, keepdim=True)
    before = ((states - fitted.mean) / fitted.std @ unit.T).square().mean(0)
    after = fitted.public.square().mean(0)
    assert before.max() / before.min() > 10
    assert torch.allclose(after / after[0], (before / before[0]) ** 0.25)


def test_what_no_public_completion_varies_in_is_left_out() -> None:
    states = torch.randn(40, 6, generator=torch.Generator().manual_seed(6)).double()
    states[:, 2] = 1.5
    fitted = fit_features(states, 1.0)
    own = states[:3].clone()
    own[:, 2] = -7.0
    assert torch.allclose(fitted.coordinates(own), fitted.coordinates(states[:3]))


@pytest.mark.slow
def test_features_are_fitted_to_public_prompts_alone(model, tmp_path, monkeypatch):
    """Whoever the users are, and whatever they were shown; where it says nothing a run warns."""
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    fitted: list[torch.Tensor] = []
    warned: list[str] = []
    monkeypatch.setattr("dprlhf.training.progress.Progress.warn", lambda _, w: warned.append(w))

    def seen(states: torch.Tensor, *given: Any) -> Features:
        fitted.append(states)
        return fit_features(states, *given)

    monkeypatch.setattr(linear_reward, "fit_features", seen)
    monkeypatch.setattr(linear_reward, "_FITTED", 15)  # of 16: those of many would take long
    for folder, rows in (("one", logs(0, 40)), ("two", logs(3, 30, prompt="so", completion="q"))):
        run_of(model, tmp_path / folder, rows=rows)
        assert len(warned) == ["one", "two"].index(folder)
    assert "the policy may follow noise" in warned[0]
    assert len(fitted[0]) == 4 * 15  # responses to what is not evaluated
    assert torch.equal(*fitted)


@pytest.mark.slow
def test_a_run_that_is_stopped_has_spent_nothing_twice(model, tmp_path, monkeypatch):
    """Between two steps; and between the charge and the checkpoint, where all is lost."""
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    whole, step = run_of(model, tmp_path / "whole"), ByReward._direction
    given = {"data": logs(0, 40), "evaluation_data": PUBLIC, "quiet": True}

    def stopping(stage: Any, run: Any, at: Any, *rest: Any) -> torch.Tensor:
        if at.t == 3:
            raise KeyboardInterrupt
        return step(stage, run, at, *rest)

    monkeypatch.setattr(ByReward, "_direction", stopping)
    with pytest.raises((KeyboardInterrupt, InterruptedRunError)):
        run_of(model, tmp_path / "again")
    monkeypatch.setattr(ByReward, "_direction", step)
    resumed = dprlhf.resume_stage(tmp_path / "again", **given)
    for one, other in zip(*(r.policy.parameters.values() for r in (whole, resumed)), strict=True):
        assert torch.equal(one, other)
    assert len([e for e in read_ledger(tmp_path / "again/ledger.jsonl") if e.kind == "charge"]) == 1

    def failing(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dprlhf.training.trainer.save", failing)
    with pytest.raises((KeyboardInterrupt, InterruptedRunError)):
        run_of(model, tmp_path / "lost")
    with pytest.raises(DprlhfError, match="nothing was learnt; start a run anew"):
        dprlhf.resume_stage(tmp_path / "lost", **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 8}, "set rounds to 1, and update.value_rounds to 0"),
        ({"update": {**REWARD, "value_rounds": 1}, "rounds": 2}, "update.value_rounds to 0"),
        ({"update": {**REWARD, "subspace": {"rank": 4, "refresh": 2}}}, "refresh: each step"),
        ({"update": {"loss_type": "linear_reward"}}, "needs public prompts"),
    ],
)
def test_settings_that_it_cannot_have_are_one_line(changes, message, model, tmp_path):
    with pytest.raises((DprlhfError, ValueError), match=message):
        run_of(model, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_model_without_layers_is_refused_before_a_charge(model, tmp_path, monkeypatch):
    monkeypatch.setattr(linear_reward.CausalLMPolicy, "layers", [])
    with pytest.raises(DprlhfError, match="has no layers for it: take policy_gradient"):
        run_of(model, tmp_path / "run")


def test_states_of_an_empty_completion_are_zero() -> None:
    trained = wide_policy(0.3)
    encoded = Reactions(SPEC).encode(trained, examples(ROWS, SPEC.data))
    encoded.mask[0, encoded.width :] = 0
    found = mean_states(trained, encoded, 4)
    assert not found[0].any()
    assert np.isfinite(found.numpy()).all()


def test_states_may_be_wider_than_embeddings() -> None:
    network = families.model("electra", embedding_size=16)
    trained = make_policy(network, tiny.tokenizer(), recipe.Adapter(type="full"))
    of_users = contributions(
        features_of(32), trained, Reactions(SPEC).encode(trained, examples(ROWS, SPEC.data)),
        SPEC.update,
    )  # fmt: skip
    assert of_users.shape == (3, 32)
    assert of_users.any(1).all()
