"""Logged feedback: gradients of users against autograd in float64, TRL's loss, and whole runs."""

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
from dprlhf.data.given_rows import rows_from
from dprlhf.data.users import Users
from dprlhf.gradients.subspace import Subspace
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.training import feedback
from dprlhf.training.dry_run import dry_run_stage
from dprlhf.training.feedback import Reactions, log_probability, reaction
from dprlhf.updates.public_gradients import weighted_gradients
from helpers import runs
from helpers.stages import (
    DATA,
    ROWS,
    check_user_sums,
    examples,
    gained,
    logs,
    loss_of_trl,
    stage_of,
    stage_of_logs,
    user_sums,
    wide_policy,
)

PUBLIC = [
    {"prompt": p, "completion": c, "label": f}
    for p, c, f in [("say ", "eee", True), ("or ", "ll", False), ("but ", "yxe", True)]
]
LOSSES: dict[str, dict[str, Any]] = {
    "policy_gradient": {"baseline": 0.125},
    "kto": {"beta": 0.5},
    "apo_zero_unpaired": {"beta": 0.5},
}
each_loss = pytest.mark.parametrize("loss", LOSSES)


@pytest.fixture(autouse=True)
def largest_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of these rows have a larger one, and some a smaller one."""
    monkeypatch.setattr(feedback, "LARGEST_RATIO", 1.02)


def settings(loss: str = "policy_gradient", **changes: Any) -> recipe.FeedbackRecipe:
    update = {"loss_type": loss, **LOSSES[loss]}
    return stage_of(recipe.FeedbackRecipe, **{"data": DATA, "update": update, **changes})


def task_of(spec: recipe.FeedbackRecipe, trained: CausalLMPolicy) -> Reactions:
    made = Reactions(spec)
    public = recipe.LoggedFeedback(path="x")
    made.compare_with(trained, examples(PUBLIC, public))
    return made


def row_loss(trained: CausalLMPolicy, row: dict[str, Any], spec: recipe.FeedbackRecipe) -> Any:
    update = spec.update
    now, reference, tokens = gained(trained, row["prompt"], row["completion"])
    if spec.data.logprob_column is not None:
        reference = row["logprob"]
    bound = update.reward_range
    counts = min(max(row["label"] - update.baseline, -bound), bound)
    if update.loss_type == "policy_gradient":
        ratio = torch.exp((now - reference) / tokens).detach().clamp(max=feedback.LARGEST_RATIO)
        return -ratio * counts * now
    z0 = 0.0
    if update.loss_type == "kto":
        shifted = zip(PUBLIC, [PUBLIC[-1], *PUBLIC[:-1]], strict=True)
        pairs = [gained(trained, a["prompt"], b["completion"]) for a, b in shifted]
        z0 = max(0.0, float(sum(new - old for new, old, _ in pairs).detach()) / len(pairs))
        assert z0 > 0
    side = math.copysign(1, counts)
    missing = 1 - torch.sigmoid(side * update.beta * (now - reference - z0))
    return 4 / update.beta * missing


@pytest.mark.parametrize("logged", [None, "logprob"])
@each_loss
def test_a_users_gradient_is_that_of_its_mean_loss_clipped_over_all_rows(loss, logged):
    spec, trained = settings(loss, data={**DATA, "logprob_column": logged}), wide_policy(0.3)
    task = task_of(spec, trained)
    check_user_sums(task, trained, ROWS, spec.data, lambda r: row_loss(trained, r, spec))


@each_loss
def test_the_weights_are_the_slopes_of_the_losses(loss: str, monkeypatch) -> None:
    """Without a cut ratio, by central differences of the losses themselves."""
    monkeypatch.setattr(feedback, "LARGEST_RATIO", 1e6)
    spec, trained = settings(loss), wide_policy(0.3)
    task, rows = Reactions(spec), examples(ROWS, spec.data)  # z₀ is no part of the derivative
    total, encoded = user_sums(task, trained, rows, 1e6)
    torch.manual_seed(2)
    along = [torch.randn_like(p) for p in trained.parameters.values()]
    ends = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for parameter, way in zip(trained.parameters.values(), along, strict=True):
                parameter.add_(step * way)
        losses = task.losses(trained, encoded, 3)[0]
        sizes = np.bincount(encoded.user)
        ends.append(float((losses / sizes[encoded.user]).sum()))
    slope = (ends[0] - ends[1]) / 2e-5
    scale = 1.0 if loss == "policy_gradient" else 4 / spec.update.beta
    expected = -float(total @ torch.cat([way.flatten() for way in along])) / scale
    assert slope == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("user", ["a", "b"])
def test_one_user_fewer_moves_the_coordinates_by_the_clip_norm_at_most(user: str) -> None:
    """Along public directions, with an adapter off its start, as in a later round."""
    spec, trained = settings(), wide_policy(0.3)
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(trained.dimension, 4, generator=generator).double()
    subspace, found = Subspace(torch.linalg.qr(drawn).Q.T.contiguous(), 50.0), []
    for rows in (ROWS, [r for r in ROWS if r["user"] != user]):
        some = examples(rows, spec.data)
        found.append(user_sums(Reactions(spec), trained, some, 1e-3, 4, subspace)[0])
    assert len(found[0]) == 4
    assert 0.9e-3 < float((found[0] - found[1]).norm()) <= 1e-3


@each_loss
def test_a_ratio_counts_at_most_its_bound(loss: str) -> None:
    """However unlikely a completion is said to have been, its weight is bounded."""
    data = {**DATA, "logprob_column": "logprob"}
    spec = settings(loss, data=data)
    rows = [{**r, "logprob": -1e6} for r in ROWS]
    trained = wide_policy(0.3)
    task = Reactions(spec)
    weights = task.weights(trained, task.encode(trained, examples(rows, spec.data)), 4)
    assert np.abs(weights).max() <= feedback.LARGEST_RATIO * spec.update.reward_range


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_the_loss_is_that_of_trl(loss: str, tmp_path: Path) -> None:
    from trl import KTOConfig, KTOTrainer

    trained, spec = wide_policy(0), settings(loss)
    update = LOSSES[loss] | {"loss_type": loss}
    theirs, seen = loss_of_trl(KTOTrainer, KTOConfig, trained, PUBLIC, tmp_path, **update)
    task = task_of(spec, trained)
    public = examples(PUBLIC, recipe.LoggedFeedback(path="x"))
    (ours,) = task.losses(trained, task.encode(trained, public), 3)
    assert float(ours.mean()) == pytest.approx(theirs, rel=1e-5)
    assert task.reference_point(trained, 3) == pytest.approx(seen["kl"], rel=1e-4)


@pytest.mark.parametrize(
    ("given", "number"),
    [(True, 1), (False, -1), ("TRUE ", 1), ("false", -1), (0, 0), ("-2.5", -2.5), (1e3, 1e3)],
)
def test_feedback_is_a_number(given: Any, number: float) -> None:
    assert reaction(given, "label") == number


@pytest.mark.parametrize("bad", ["SECRET", "nan", math.inf, "1e999", 10**400, [1], {}, b"1", None])
def test_other_feedback_is_refused_without_quoting_it(bad: Any) -> None:
    for read, given in ((reaction, bad), (log_probability, bad), (log_probability, 0.5)):
        with pytest.raises(DprlhfError, match="column 'c'") as caught:
            read(given, "c")
        assert "SECRET" not in str(caught.value)


def test_a_cut_completion_has_no_logged_probability() -> None:
    spec = settings(data={**DATA, "logprob_column": "logprob", "max_completion_tokens": 3})
    with pytest.raises(DprlhfError, match=r"raise data\.max_completion_tokens"):
        task_of(spec, trained := wide_policy(0)).encode(trained, examples(ROWS, spec.data))


@pytest.mark.parametrize(
    ("public", "changes", "message"),
    [
        ({"label": "SECRET"}, {}, r"evaluation\.data\.label_column 'label': .* \(row 1\)"),
        ({"completion": None}, {}, r"a row has no 'completion': fill or drop it \(row 1\)"),
        ({}, {"data": {"label_column": "liked"}}, r"no column 'liked' \(label_column\)"),
        ({}, {"data": {"logprob_column": "label"}}, "both 'label': each needs a column"),
        ({}, {"update": {"sync_ref_model": True}}, "sync_ref_model is not offered"),
    ],
)
def test_wrong_public_rows_and_columns_are_one_line(public, changes, message, model, tmp_path):
    evaluation = {"data": {"path": "in-memory"}, "declared_public": True}
    changes = {"evaluation": evaluation, **changes}
    changes["data"] = {"path": "in-memory", "user_column": "user", **changes.get("data", {})}
    rows = [r | public for r in logs(100, 1, label="True")] + logs(101, 3, label="False")

    def act() -> None:
        spec = stage_of_logs(model, tmp_path / "run", **changes)
        dprlhf.train_stage(spec, data=logs(0, 40), evaluation_data=rows, quiet=True)

    with pytest.raises((DprlhfError, ValueError), match=message) as caught:
        act()
    assert "SECRET" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("label", [[True], {"a": 1}])
def test_a_column_of_another_kind_is_refused(label: Any, model: str, tmp_path: Path) -> None:
    spec = stage_of_logs(model, tmp_path / "run")
    with pytest.raises(DprlhfError, match=r"'label' holds .*: give true and false, or numbers"):
        dprlhf.train_stage(spec, data=logs(0, 40, label=label), quiet=True)


def test_a_dry_run_tells_what_numbers_count_as(model: str, tmp_path: Path) -> None:
    plan = dry_run_stage(stage_of_logs(model, tmp_path / "run"), logs(0, 40, label=1))
    assert any("with labels 0 and 1, set update.baseline=0.5" in told for told in plan["warnings"])


@pytest.mark.slow
@each_loss
def test_it_learns_without_noise(loss, tmp_path, monkeypatch):
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    model = str(runs.save_sharp(tmp_path / "model"))
    spec = stage_of_logs(
        model, tmp_path / "free", update={"loss_type": loss}, privacy={"epsilon": math.inf},
        optimizer={"learning_rate": 0.05},
        evaluation={"data": {"path": "in-memory"}, "prompts": 4, "declared_public": True},
    )  # fmt: skip
    run = dprlhf.train_stage(spec, data=logs(0, 40), evaluation_data=logs(100, 4), quiet=True)
    assert run.after["loss"].mean < run.before["loss"].mean - 0.005
    last = json.loads((tmp_path / "free/evaluation.json").read_text())["after"]
    assert set(last) == set(recipe.FeedbackRecipe.public_losses)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["policy_gradient", "kto"])
def test_directions_avoid_what_a_log_says_without_its_labels(loss, model, tmp_path, monkeypatch):
    """Otherwise labels that are mostly false push the policy away from the log as a whole."""
    seen = []

    def kept(policy: Any, rows: Any, weights: Any, size: int) -> torch.Tensor:
        vectors = weighted_gradients(policy, rows, weights, size)
        seen.append(torch.tensor(weights).sign()[:, None] * vectors.double())
        return vectors

    monkeypatch.setattr(feedback, "weighted_gradients", kept)
    public = [
        row | {"completion": " " + "abxyz"[i % 5] * (1 + i % 3), "label": i % 4 == 0}
        for i, row in enumerate(logs(100, 24))
    ]
    spec = stage_of_logs(
        model, tmp_path / "run", rounds=1,
        update={"loss_type": loss, "subspace": {"rank": 4, "prompts": 24}},
        evaluation={"data": {"path": "in-memory"}, "prompts": 4, "declared_public": True},
    )  # fmt: skip
    dprlhf.train_stage(spec, data=logs(0, 40), evaluation_data=public, quiet=True)
    mean = (seen[0] / seen[0].norm(dim=1, keepdim=True)).mean(0)
    directions = load_file(tmp_path / "run/checkpoint/subspace.safetensors")["directions"]
    assert mean.norm() > 0.1
    assert (directions.double() @ mean).norm() < 1e-5


@pytest.mark.parametrize("bad", ["words", None, "nan", "1e999"])
def test_a_row_without_feedback_leaves_the_sum_as_a_blank_user_does_to_the_bit(bad: Any) -> None:
    """Whatever stands in place of its label, its user moves no bit of the others' part."""
    spec, trained = settings(data=DATA), wide_policy(0.3)
    task, found = task_of(spec, trained), []
    for values in ({"label": bad}, {"label": None, "prompt": None, "completion": None}):
        rows = [
            {**r, "label": str(r["label"])} | (values if r["user"] == "a" else {}) for r in ROWS
        ]
        users = Users(rows_from(rows, "prompt"), spec.data)
        read = users.readable(np.arange(3), lambda some: task.encode(trained, some))
        assert sorted(read.users.tolist()) == [1, 1, 1, 2, 2]
        found.append(user_sums(task, trained, read, 0.05)[0])
    assert torch.equal(*found)
