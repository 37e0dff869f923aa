"""Attacks must come near the claimed ε where they can, stay below it, and see planted bugs."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import dprlhf
from dprlhf.audit import (
    Audit,
    audit,
    audit_plan,
    epsilon_lower_bound,
    membership_scores,
    one_run,
    roc,
)
from dprlhf.audit.canaries import prompt_run
from dprlhf.audit.guesses import log_likelihood_ratio
from dprlhf.cli.app import app
from dprlhf.errors import DprlhfError
from dprlhf.gradients import clipping
from dprlhf.privacy.ledger import Ledger, read_ledger
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.recipe import Recipe, make_recipe
from dprlhf.recipe.loading import recipe_from
from dprlhf.runs.earlier import records_of, total_of_runs
from dprlhf.runs.folder import RunFolder
from dprlhf.updates import UPDATES, PrivateRound
from helpers import tiny
from helpers.broken_gates import BROKEN, break_gate


@pytest.fixture(autouse=True)
def _the_same_noise_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprlhf.runs.folder.new_key", lambda: bytes(range(32)))


@pytest.fixture(autouse=True)
def _no_false_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the usual confidence one audit in twenty may refute a claim that is true."""
    monkeypatch.setitem(one_run.audit.__kwdefaults__, "confidence", 1 - 1e-4)
    monkeypatch.setitem(one_run.audit_plan.__kwdefaults__, "confidence", 1 - 1e-4)


@pytest.mark.parametrize(
    ("m", "r", "v", "delta", "expected"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.676)],
)
def test_the_one_run_bound_has_the_published_values(m, r, v, delta, expected):
    assert epsilon_lower_bound(m, r, v, delta) == pytest.approx(expected, abs=6e-4)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(st.integers(1, 60), st.data(), st.sampled_from([0.0, 1e-6, 1e-3]))
def test_the_one_run_bound_is_where_p_reaches_what_is_left(r: int, data: Any, delta: float) -> None:
    m, v = r + data.draw(st.integers(0, 100)), data.draw(st.integers(0, r))
    bound = epsilon_lower_bound(m, r, v, delta)

    def p(epsilon: float) -> float:  # the formula, term by term
        q = 1 / (1 + math.exp(-epsilon))
        mass = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
        slack = max((sum(mass[v - i : v]) / i for i in range(1, v + 1)), default=0.0)
        return min(1.0, sum(mass[v:]) + 2 * m * delta * slack)

    if bound == 0:
        assert p(0.0) >= 0.05 - 1e-9
    else:
        assert p(bound - 1e-9) < 0.05 + 1e-9
        assert p(bound + 2e-5) > 0.05 - 1e-9


@pytest.mark.parametrize("partition", ["random-allocation", "fixed", "poisson"])
@pytest.mark.parametrize("participations", [1, 2])
def test_the_likelihood_ratio_averages_to_one_without_the_user(partition, participations):
    """E[P₁/P₀] = 1 under P₀, and the log of the density by summing over all rounds."""
    if partition == "fixed" and participations > 1:
        pytest.skip("a user of a fixed partition has one round")
    plan = make_plan(users=8, rounds=4, delta=1e-5, noise_multiplier=1.5, partition=partition)
    mechanism = dataclasses.replace(plan.mechanism, participations=participations)
    plan = dataclasses.replace(plan, mechanism=mechanism)  # its ε does not matter here
    noise = 1.5 * np.random.default_rng(0).standard_normal((50_000, 4))
    ratio = np.exp(log_likelihood_ratio(noise, plan))
    assert ratio.mean() == pytest.approx(1, abs=4 * ratio.std() / math.sqrt(len(ratio)))
    assert ratio.std() > 0.1


def plan_of(epsilon: float, **changes: Any) -> Plan:
    values: dict[str, Any] = {"users": 2, "rounds": 1, "delta": 1e-5, "partition": "fixed"}
    return make_plan(epsilon=epsilon, **(values | changes))


def recipe_of(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "policy": {"model_name_or_path": "nowhere"}, "data": {"path": "nowhere"},
        "rewards": [{"function": "nowhere"}], "privacy": {"epsilon": 8.0, "delta": 1e-5},
        "rounds": 4,
    }  # fmt: skip
    for key, value in changes.items():
        old = values.get(key)
        values[key] = {**old, **value} if isinstance(old, dict) else value
    return make_recipe(values)


def run_audit(folder: Path, canaries: int = 160, seed: int = 0, **changes: Any) -> Audit:
    return audit(recipe_of(**changes), folder / "audit", canaries=canaries, seed=seed, quiet=True)


WITHOUT_NOISE = {"epsilon": math.inf, "partition": "stream"}


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
def test_every_update_moves_each_canary_where_the_attack_looks(update: str, tmp_path: Path) -> None:
    """The negative control: without noise nearly every guess is right, so the attack has teeth."""
    found = run_audit(tmp_path, update={"name": update}, privacy=WITHOUT_NOISE)
    assert found.right >= 0.95 * found.guesses
    assert found.bound > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "loss"),
    [("sft", None), ("reward", None), ("dpo", None), ("feedback", "kto"),
     ("feedback", "linear_reward")],
)  # fmt: skip
def test_a_supervised_stage_is_audited_without_its_public_rows(stage, loss, tmp_path):
    values = {
        "stage": stage, "policy": {"model_name_or_path": "m"}, "data": {"path": "no.csv"},
        "evaluation": {"data": {"path": "none.csv"}}, "privacy": {"epsilon": 8.0}, "rounds": 1,
        "update": {"subspace": {"rank": 4}} | ({"loss_type": loss} if loss else {}),
    }  # fmt: skip
    spec = recipe_from(values, (), source="test")
    found = audit(spec, tmp_path / "audit", canaries=40, seed=0, quiet=True)
    assert found.holds
    assert found.right > 0.6 * found.guesses


@pytest.mark.parametrize("update", UPDATES)
def test_no_update_is_refuted(update: str, tmp_path: Path) -> None:
    found = run_audit(tmp_path, 80, update={"name": update}, privacy={"partition": "stream"})
    assert found.bound <= found.epsilon
    assert found.holds


@pytest.mark.slow
@pytest.mark.parametrize(
    "privacy",
    [
        {"partition": "random-allocation"},
        {"partition": "fixed"},
        {"partition": "stream", "adjacency": "replace-one"},
        {"partition": "poisson", "epsilon": None, "noise_multiplier": 2.0, "delta": 1e-3},
    ],
    ids=lambda p: "-".join(str(x) for x in p.values()),
)
def test_no_partition_is_refuted(privacy: dict[str, Any], tmp_path: Path) -> None:
    found = run_audit(tmp_path, 80, privacy=privacy)
    assert found.bound <= found.epsilon


def look_up(name: str) -> str:
    """Return an answer.

    Args:
        name: A name.
    """
    return name


ROLLOUTS: dict[str, dict[str, Any]] = {
    "cut at one token": {"mask_truncated": True}, "the likeliest alone": {"top_k": 1},
    "a nucleus": {"top_p": 0.1}, "as likely as the likeliest": {"min_p": 1.0},
    "stop": {"stop": ["a"]}, "an agent": {"agent": {"tools": [f"{__file__}:look_up"]}},
}  # fmt: skip


@pytest.mark.parametrize("rollout", ROLLOUTS.values(), ids=ROLLOUTS)
def test_no_way_of_sampling_hides_the_canaries(rollout: dict[str, Any], tmp_path: Path) -> None:
    found = run_audit(tmp_path, 40, rollout=rollout, privacy=WITHOUT_NOISE)
    assert found.right >= 0.95 * found.guesses


@pytest.mark.parametrize("rollout", [{"mask_truncated": True}, ROLLOUTS["an agent"]], ids=str)
def test_no_way_of_sampling_hides_prompt_canaries(rollout: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(policy=tiny_policy(tmp_path), rounds=1, rollout={"responses": 8, **rollout})
    found = audit(recipe, tmp_path / "audit", canaries=12, space="prompt", seed=1, quiet=True)
    assert found.holds


@pytest.mark.parametrize("space", ["gradient", "prompt"])
def test_canaries_that_move_nothing_are_no_audit(space, tmp_path, monkeypatch):
    """The noise may be as planned all the same, and was called consistent with the claim."""
    monkeypatch.setattr("dprlhf.audit.canaries.ANSWERS", ("neither", "b"))
    monkeypatch.setattr("dprlhf.audit.canaries._likes", lambda prompt, first: False)
    recipe = recipe_of(policy=tiny_policy(tmp_path))
    with pytest.raises(DprlhfError, match=r"the canaries moved nothing .* this is no audit"):
        audit(recipe, tmp_path / "audit", canaries=12, space=space, quiet=True)
    assert not (tmp_path / "audit/audit.json").exists()


def tiny_policy(folder: Path) -> dict[str, Any]:
    return {
        "model_name_or_path": str(tiny.save(folder / "model")),
        "adapter": {"type": "lora", "rank": 1, "target_modules": ["c_attn"]},
    }


def earlier_run(folder: Path, column: str) -> str:
    """A folder that has what a later run reads of an earlier one, whose users are a column's."""
    folder.mkdir()
    write_recipe(folder)
    terms = {**plan_of(4.0).terms(), "unit": column, "key_commitment": "0" * 64}
    Ledger(folder / "ledger.jsonl", terms).close()
    return str(folder)


def test_a_later_stage_with_a_user_column_is_audited_by_itself(tmp_path: Path) -> None:
    previous = [{"run": earlier_run(tmp_path / "one", "user")}]
    found = run_audit(tmp_path, 20, data={"user_column": "user"}, previous=previous)
    assert found.epsilon <= 8
    assert "previous" not in read_ledger(tmp_path / "audit/ledger.jsonl")[0].body


def test_clipping_rows_in_place_of_users_is_found(tmp_path, monkeypatch):
    """Eight responses of a user, each clipped to S, are eight times the sensitivity."""
    real = PrivateRound.clipped_sum

    def rows_are_users(self: PrivateRound, weights: Any, *, batch_size: int) -> Any:
        from dprlhf.boundary import Private, open_private

        held = open_private(self.responses)
        own = np.arange(len(held.user))
        grid = own.reshape(-1, 1, 1)
        split = dataclasses.replace(held, user=own, users=len(own), grid=grid, num_generations=1)
        kept, self.responses = self.responses, Private(split)
        monkeypatch.setattr(PrivateRound, "_extra", lambda _: Private(np.zeros((split.users, 2))))
        try:
            return real(self, weights, batch_size=batch_size)
        finally:
            self.responses = kept

    monkeypatch.setattr(PrivateRound, "clipped_sum", rows_are_users)
    # There are more rows than users, which by itself ends a run.
    monkeypatch.setattr("dprlhf.gradients.clipping._check_number", lambda *_: None)
    found = run_audit(tmp_path, privacy={"partition": "stream", "epsilon": 1.0})
    assert found.bound > 1


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
def test_broken_noise_is_found_through_the_trainer(fault, tmp_path, monkeypatch):
    break_gate(monkeypatch, fault)
    found = run_audit(tmp_path, privacy={"epsilon": 4.0})
    assert found.verdict == "refuted"


def test_the_bits_are_not_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed includes the same canaries whatever the run's key; none, others each time."""
    asked: list[int] = []
    real = np.random.default_rng
    monkeypatch.setattr(
        "dprlhf.audit.one_run.np.random.default_rng", lambda s: asked.append(s) or real(s)
    )
    for name, seed in (("a", 7), ("b", None), ("c", None)):
        audit(recipe_of(rounds=1), tmp_path / name, canaries=4, seed=seed, quiet=True)
    # The checks and the simulation of the power have fixed seeds of their own.
    drawn = [s for s in asked if isinstance(s, int) and (s == 7 or s > 2**64)]
    assert len(drawn) == 3
    assert drawn[0] == 7
    assert drawn[1] != drawn[2]


def test_an_audit_reads_no_private_data_and_is_marked(tmp_path: Path) -> None:
    found = run_audit(tmp_path, canaries=20)  # the recipe's model and data do not exist
    held = json.loads((tmp_path / "audit/audit.json").read_text())
    assert held["audit"] == "canaries only, no private data"
    assert held["bound"] == found.bound
    assert not (tmp_path / "audit/policy").exists()
    assert not (tmp_path / "audit/privacy.json").exists()  # it promises nobody anything


@pytest.mark.parametrize("column", ["user", "prompt"])
def test_prompt_canaries_keep_the_unit_and_the_runs_before(column: str, tmp_path: Path) -> None:
    """A model that an earlier run tuned is refused where that run is not named."""
    run = earlier_run(tmp_path / "one", column)
    tiny.save(tmp_path / "model")
    (tmp_path / "privacy.json").write_text(json.dumps({"run": "0" * 64}))
    policy = {
        "model_name_or_path": str(tmp_path / "model"),
        "adapter": {"type": "lora", "target_modules": ["c_attn"]},
    }
    recipe = recipe_of(
        policy=policy, rounds=1, rollout={"responses": 8}, previous=[{"run": run}],
        data={"user_column": column},
    )  # fmt: skip
    found = audit(recipe, tmp_path / "audit", canaries=4, space="prompt", seed=1, quiet=True)
    assert found.holds
    assert read_ledger(tmp_path / "audit/ledger.jsonl")[0].body["unit"] == column


@pytest.mark.slow
def test_prompt_canaries_go_through_the_recipes_own_model(tmp_path: Path) -> None:
    model = tiny.model()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5)
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    policy = {
        "model_name_or_path": str(tmp_path / "model"),
        "adapter": {"type": "lora", "rank": 8, "target_modules": "all-linear"},
    }
    recipe = recipe_of(policy=policy, rounds=1, rollout={"responses": 8})
    found = audit(recipe, tmp_path / "private", canaries=8, space="prompt", seed=1, quiet=True)
    assert found.bound <= 8
    # The control: the attack sees something where no noise is in its way.
    included = np.random.default_rng(2).random(120) < 0.5
    recipe = recipe_of(policy=policy, privacy=WITHOUT_NOISE, rounds=1, rollout={"responses": 16})
    signs = np.where(included, 1.0, np.nan)
    folder = RunFolder(tmp_path / "baseline")
    moved = prompt_run(recipe, folder, signs, True, lambda *told: None).gains
    assert roc(moved[included], moved[~included]).auc > 0.6


@pytest.mark.slow
def test_telemetry_above_its_bound_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's extra coordinates grew after they were clipped; the noise is as planned."""
    right = clipping.clip_users

    def wrong(vectors: torch.Tensor, *bounds: Any, **given: Any) -> Any:
        clipped, norms = right(vectors, *bounds, **given)
        return (clipped * 30 if 0 < vectors.shape[1] <= 3 else clipped), norms

    def reasons(name: str) -> list[str]:
        found = run_audit(tmp_path / name, 60, privacy={"partition": "stream"})
        return [reason for reason in found.refuted_by if "rides beside the gradient" in reason]

    assert reasons("right") == []
    monkeypatch.setattr(clipping, "clip_users", wrong)
    assert len(reasons("wrong")) == 1


def write_recipe(folder: Path) -> str:
    path = folder / "recipe.yaml"
    path.write_text(
        "policy: {model_name_or_path: nowhere}\ndata: {path: nowhere}\n"
        "rewards: [{function: nowhere}]\nprivacy: {epsilon: 4}\nrounds: 2\n"
    )
    return str(path)


def test_the_command_prints_the_bound_next_to_the_claim(tmp_path: Path) -> None:
    command = ["audit", write_recipe(tmp_path), "--canaries", "400", "--output-dir"]
    shown = CliRunner().invoke(app, [*command, str(tmp_path / "a")])
    assert shown.exit_code == 0, shown.output
    assert "claimed: epsilon <= 4 at delta 1e-05" in shown.output
    assert "audited: epsilon >= " in shown.output
    assert shown.output.startswith("power: would see noise ")
    assert "verdict: consistent" in shown.output
    assert "warning" not in shown.output  # absent canaries have no valid reward, on purpose
    held = CliRunner().invoke(app, [*command, str(tmp_path / "b"), "--json"])
    assert json.loads(held.output)["canaries"] == 400


def test_a_claim_that_cannot_be_refuted_is_another_exit_status(tmp_path: Path) -> None:
    command = ["audit", write_recipe(tmp_path), "privacy.epsilon=200", "--canaries", "4"]
    shown = CliRunner().invoke(app, [*command, "--output-dir", str(tmp_path / "a")])
    assert shown.exit_code == 3, shown.output
    assert "verdict: cannot refute at this size: even 4 right guesses" in shown.output


def length(prompts: list[str], completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


@pytest.mark.slow
def test_a_runs_card_states_its_audit_and_keeps_it(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    prompts = ["a", "b", "c", "d"]
    dprlhf.train(
        model=str(tiny.save(tmp_path / "model")), prompts=prompts, reward=length, epsilon=4.0,
        rounds=2, rollout__max_new_tokens=2,
        policy__adapter={"type": "lora", "target_modules": ["c_attn"]}, privacy__tuning_runs=1,
        output_dir=run, quiet=True,
    )  # fmt: skip
    card = json.loads(RunFolder(Path(run)).privacy.read_text())
    readme = RunFolder(Path(run)).policy / "README.md"
    assert "Audit: not run." in readme.read_text()
    assert records_of(Path(run))[0].tuning_runs == 1
    assert total_of_runs([Path(run)])[1].epsilon == pytest.approx(card["total"]["epsilon"])
    before = {p: p.read_bytes() for p in Path(run).rglob("*") if p.is_file()}

    command = ["audit", run, "--canaries", "40", "--output-dir", str(tmp_path / "audit")]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    found = json.loads((tmp_path / "audit" / "audit.json").read_text())
    audited = json.loads(RunFolder(Path(run)).privacy.read_text())
    assert audited == card | {"audits": [{k: v for k, v in found.items() if k != "audit"}]}
    assert audited["audits"][0]["holds"]
    assert "an attack with 40 canary users (gradient space) shows epsilon >=" in readme.read_text()
    noted = {RunFolder(Path(run)).privacy, readme}
    assert {p: p.read_bytes() for p in before if p not in noted} == {
        p: content for p, content in before.items() if p not in noted
    }
    dprlhf.resume(run, prompts=prompts, reward=length, quiet=True)
    assert json.loads(RunFolder(Path(run)).privacy.read_text()) == audited
    assert "canary users" in readme.read_text()

    refused = CliRunner().invoke(app, [*command, "rounds=3"])
    assert isinstance(refused.exception, DprlhfError)
    assert "leave the overrides out" in str(refused.exception)


@pytest.mark.parametrize("confidence", [95, None])
def test_a_confidence_that_is_no_probability_is_refused_before_any_work(
    confidence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_run, "vector_run", lambda *_: pytest.fail("the audit ran"))
    for refused in (
        lambda: audit(recipe_of(), tmp_path / "audit", confidence=confidence),
        lambda: audit_plan(plan_of(4.0, users=80), bytes(32), confidence=confidence),
    ):
        with pytest.raises(DprlhfError, match=r"confidence must be above 0 and below 1") as caught:
            refused()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "audit").exists()


def test_membership_scores_are_zero_where_nothing_moved_and_see_what_did(tmp_path: Path) -> None:
    """Half of the bandit's prompts are moved by hand: those are the members."""
    from dprlhf import recipe
    from dprlhf.audit import BanditPolicy
    from dprlhf.data.public import in_memory_prompts
    from dprlhf.rewards import Scorer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(c == "a") for c in completions]

    policy, scorer = BanditPolicy(20), Scorer([reward], 1.0)
    prompts, rollout = (
        in_memory_prompts([str(i) for i in range(20)]),
        recipe.Rollout(max_new_tokens=1, batch_size=32),
    )
    still = membership_scores(policy, scorer, prompts, rollout)
    assert all((scores == 0).all() for scores in still.values())
    policy.load_state({"table.weight": torch.tensor([[5.0] * 10 + [0.0] * 10])})
    for scores in membership_scores(policy, scorer, prompts, rollout).values():
        assert roc(scores[:10], scores[10:]).auc == 1.0
