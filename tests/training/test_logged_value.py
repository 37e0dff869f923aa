"""The private value of a policy from logs: its bound, its interval against a known truth, runs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dprlhf
from dprlhf import DprlhfError
from dprlhf.errors import InterruptedRunError
from dprlhf.runs.report import write_report
from dprlhf.training.feedback import LoggedValue, Value, least, of_users
from helpers.stages import logs, stage_of_logs

Array = NDArray[np.float64]


def test_nobody_brings_more_than_the_clip_norm_whatever_the_rows() -> None:
    rng = np.random.default_rng(0)
    user = rng.integers(0, 50, 400)
    ratios = rng.choice([-1e9, -3.0, 0.0, 1.3, 50.0, 1e9, math.inf, -math.inf], 400)
    vectors = of_users(user, 51, ratios, rng.choice([0.0, 0.3, 1.0], 400), scale=0.7)
    assert float(vectors.norm(dim=1).max()) <= 0.7 * (1 + 1e-12)
    assert float(of_users(np.zeros(1, int), 1, np.full(1, 9.0), np.ones(1), 0.7).norm()) > 0.69
    assert not vectors[50].any()  # a user without a row


def test_a_user_without_a_likelihood_spoils_nobody_else() -> None:
    given = np.array([0.1, math.nan, -0.2])
    vectors = of_users(np.array([0, 1, 2]), 3, given, np.full(3, 0.5), 1.0)
    assert vectors[1].isnan().any()  # which the clipping makes zero
    assert bool(vectors[[0, 2]].isfinite().all())


def told(log_ratios: Array, shares: Array, *, noise: float = 0.0, **means: float) -> Any:
    """Return the estimates from one round of users with one row each."""
    count = len(shares)
    vectors = of_users(np.arange(count), count, log_ratios, shares, 1.0).numpy()
    value = LoggedValue()
    rng = np.random.default_rng(int(means.get("seed", 0)))
    value.add((vectors.mean(0) + noise * rng.standard_normal(4)).tolist(), noise, 1.0)
    return value.estimates(count, means.get("middle", 0.0), means.get("bound", 1.0))


def test_it_is_self_normalised_importance_sampling() -> None:
    rng = np.random.default_rng(1)
    shares, ratios = rng.random(500), rng.normal(0, 0.3, 500)
    found = told(ratios, shares, middle=3.0, bound=2.0)
    weights = np.exp(ratios)
    feedback = 3 + 2 * (2 * shares - 1)
    assert found["tuned"].mean == pytest.approx((weights * feedback).sum() / weights.sum())
    assert found["tuned"].weight == pytest.approx(weights.mean())
    assert found["logged"].mean == pytest.approx(feedback.mean())
    assert found["logged"].weight == pytest.approx(1.0)


def deployments(tilt: float, count: int = 400, users: int = 150) -> tuple[float, list[Value]]:
    """Return the true value of a policy, and its estimate in simulated deployments.

    Twenty responses; the tuned policy is the logged one tilted towards those that are liked.
    """
    rng = np.random.default_rng(2)
    logged = rng.dirichlet(np.ones(20))
    liked = rng.random(20)
    tuned = logged * np.exp(tilt * liked)
    tuned /= tuned.sum()
    truth = float(tuned @ (2 * liked - 1))
    found = []
    for _ in range(count):
        present = rng.binomial(4 * users, 0.25)  # of random allocation, of which m is the mean
        shown = rng.choice(20, present, p=logged)
        shares = (rng.random(present) < liked[shown]).astype(float)
        ratios = np.log(tuned / logged)[shown]
        vectors = of_users(np.arange(present), present, ratios, shares, 1.0).numpy()
        value, noise = LoggedValue(), 0.9 / users
        noised = vectors.sum(0) / users + noise * rng.standard_normal(4)
        value.add(noised.tolist(), noise, 1.0)
        found.append(value.estimates(users, 0.0, 1.0)["tuned"])
    return truth, found


@pytest.mark.parametrize("tilt", [0.0, 1.5, 12.0])
def test_the_interval_holds_the_truth_at_its_level(tilt: float) -> None:
    """Also where the truncation takes much of the policy: then the interval is wide."""
    truth, found = deployments(tilt)
    held = np.mean([v.low <= truth <= v.high for v in found])
    assert held >= 0.95
    width = np.mean([v.high - v.low for v in found])
    assert width < (0.85 if tilt < 2 else 1.9)


def test_the_self_normalised_mean_alone_would_not_count_truncation() -> None:
    """The negative control: its standard error says nothing of what is cut off."""
    truth, found = deployments(12.0)
    means = np.array([v.mean for v in found])
    assert np.mean(np.abs(means - truth) < 1.96 * means.std()) < 0.95


def test_the_bound_on_a_mean_solves_its_equation() -> None:
    for noised, most, std, users in [(0.4, 4.0, 0.05, 60.0), (0.9, 1.0, 0.0, 100.0)]:
        low = least(noised, most, std, users)
        assert (noised - low) ** 2 == pytest.approx(1.959964**2 * (std**2 + most * low / users))
    assert least(-0.5, 4.0, 0.1, 60.0) == 0.0


FREE = {"update": {"loss_type": "policy_gradient", "value_rounds": 2}}


def test_a_run_states_the_value_and_leaves_the_policy_in_these_rounds(model, tmp_path, monkeypatch):
    seen: list[dict[str, Any]] = []
    spec = stage_of_logs(model, tmp_path / "run", **FREE)
    result = dprlhf.train_stage(spec, data=logs(0, 80), callbacks=[seen.append], quiet=True)
    assert [m["round"] for m in seen if "value_tuned_low" in m] == [3, 4]
    found = json.loads((tmp_path / "run/evaluation.json").read_text())["value"]
    assert set(found) == {"tuned", "logged"}
    assert found["tuned"]["low"] == seen[-1]["value_tuned_low"] == result.value["tuned"].low
    assert "95% interval" in dict(result.summary)["value, tuned"]
    card = json.loads((tmp_path / "run/privacy.json").read_text())
    assert any("last 2 gradients" in line for line in card["released"])
    assert card["value"]["tuned"] == str(result.value["tuned"])
    for folder in ("policy", "model"):
        readme = (tmp_path / "run" / folder / "README.md").read_text()
        assert f"the tuned policy {result.value['tuned']}" in readme
        assert ("Whole weights with the adapter merged" in readme) == (folder == "model")
    assert json.loads((tmp_path / "run/model/privacy.json").read_text()) == card
    none = stage_of_logs(model, tmp_path / "none", update={"loss_type": "policy_gradient"})
    plain = dprlhf.train_stage(none, data=logs(0, 80), quiet=True)
    assert plain.plan.guarantee == result.plan.guarantee
    report = write_report([tmp_path / "run"])
    assert "Feedback that the tuned policy gets" in report.read_text()


def test_a_resumed_run_states_what_an_uninterrupted_one_does(model, tmp_path, monkeypatch):
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))
    written = []
    for stops in (False, True):
        (tmp_path / str(stops)).mkdir()
        monkeypatch.chdir(tmp_path / str(stops))

        def stop(metrics: dict[str, Any], stops: bool = stops) -> None:
            if stops and metrics["round"] == 3:
                raise KeyboardInterrupt

        spec = stage_of_logs(model, Path("run"), **FREE)
        given: dict[str, Any] = {"data": logs(0, 80), "quiet": True}
        if stops:
            with pytest.raises(InterruptedRunError):
                dprlhf.train_stage(spec, callbacks=[stop], **given)
            dprlhf.resume_stage("run", **given)
        else:
            dprlhf.train_stage(spec, **given)
        written.append(json.loads(Path("run/evaluation.json").read_text()))
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 2}, "2 of 2 rounds would leave none that learn"),
        (
            {"privacy": {"epsilon": 8.0, "participations": 2}},
            "users that the policy has not learnt",
        ),
        ({"privacy": {"epsilon": 8.0, "partition": "fixed", "bands": 2}}, "noise of their own"),
    ],
)
def test_a_value_from_users_who_taught_the_policy_is_refused(changes, message):
    with pytest.raises((DprlhfError, ValueError), match=message):
        stage_of_logs("x", Path("run"), **FREE, **changes)
