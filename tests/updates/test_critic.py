"""The noised critic: what it adds to a user's vector, what it costs, and what it is good for."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
import yaml
from dp_accounting.pld import PLDAccountant
from numpy.typing import NDArray
from safetensors.torch import load_file

import dprlhf
from dprlhf import DprlhfError, recipe
from dprlhf.boundary import BoundedSum, Released, open_private
from dprlhf.data.users import Prompts
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import load_policy
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger, read_ledger
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses, sample
from dprlhf.updates import UPDATES
from dprlhf.updates.critic import Critic
from dprlhf.updates.pg import advantage_weights, round_advantage_weights
from dprlhf.updates.telemetry import TelemetryCoordinates
from helpers.autograd import gradient_of_user, relative_error
from helpers.batches import Shape, batch_of
from helpers.policies import policy_of
from helpers.recipes import recipe_settings, refusal
from helpers.rounds import FixedGate, OpenGate, round_of, some_users, value_of
from helpers.runs import lower_case, save_sharp, train

Array = NDArray[np.float64]
R = 3.0
ADAPTER = recipe.Adapter(type="lora", rank=2, target_modules=["c_attn"])
SHAPE = Shape([[5, 1], [2], [18], [7]], k=2, length=4)
NO_NOISE = make_plan(users=1000, rounds=10, delta=1e-5, epsilon=math.inf, clip_norm=0.5)


def public_prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 257, random.integers(1, 20)).tolist() for _ in range(count)]


def critic_of(policy: CausalLMPolicy, plan: Plan = NO_NOISE, **changes: Any) -> Critic:
    """A critic that has looked at forty public prompts and has some w."""
    spec = recipe.Critic.model_validate({"features": 3, "share": 0.2, **changes})
    critic = Critic.from_plan(spec, plan, policy, R, 64)
    critic.fit_features(policy, public_prompts(40))
    critic.w = torch.linspace(1.5, -1, critic.count, dtype=torch.float64)
    return critic


def scores_of(responses: Responses, seed: int = 1) -> Scores:
    values = np.random.default_rng(seed).uniform(-R, R, len(responses.user))
    return Scores(values, np.ones(len(values), dtype=bool), {})


def update_of(name: str, **changes: Any) -> Any:
    fixed = {"pg": {}, "grpo": {"scale_rewards": False}, "ppo": {"local_learning_rate": 1.0}}
    return recipe.make_recipe(
        recipe_settings(
            update={"name": name, "clip_norm": 0.5, "batch_size": 6, **fixed[name], **changes}
        )
    ).update


def last_state(policy: CausalLMPolicy, responses: Responses, row: int) -> torch.Tensor:
    """The base model's last hidden state of one unpadded prompt."""
    end = -responses.max_new_tokens
    ids = responses.tokens[row, :end][responses.mask[row, :end].bool()]
    with torch.no_grad(), policy.base():
        out = policy.model(input_ids=ids[None], output_hidden_states=True)
    state: torch.Tensor = out.hidden_states[-1][0, -1]
    return state


# --- a user's part, from scratch ---------------------------------------------------------------


@pytest.mark.parametrize(("kind", "seed"), [("gpt2", 10), ("llama", 11)])
def test_the_clipped_sum_from_scratch(kind: Any, seed: int) -> None:
    """Gradient with blended advantages, telemetry and the critic's coordinates, user by user."""
    policy = policy_of(kind, "lora")
    responses = batch_of(SHAPE, seed)  # some features beyond norm 1, some within
    scores = scores_of(responses)
    scores.valid[np.flatnonzero(responses.user == 1)[0]] = False
    clip_norm, share, weight = 0.5, 0.2, 0.7
    critic = critic_of(policy, weight=weight)
    telemetry = TelemetryCoordinates(0.1, R)
    old = critic.w.clone()
    round_, gate = round_of(
        policy, responses, scores, clip_norm=clip_norm, telemetry=telemetry, critic=critic
    )
    UPDATES["pg"](round_, update_of("pg"))

    features, weights = [], np.zeros(len(responses.user))
    for row in range(len(responses.user)):
        x = (last_state(policy, responses, row - row % 2) - critic.centre) @ critic.directions.T
        u = x * min(1.0, 1 / float(x.norm()))
        features.append(torch.cat([torch.ones(1), u]).double() / math.sqrt(2))
        value = float((old * features[row]).sum().clamp(-R, R))
        reward, other = scores.values[row], scores.values[row + 1 - 2 * (row % 2)]
        advantage = (1 - weight) * (reward - other) + weight * (reward - value)
        weights[row] = advantage / (responses.user == responses.user[row]).sum()
    clipped = [float(f[1:].norm()) for f in features]
    assert min(clipped) < 0.9 / math.sqrt(2) < 0.999 / math.sqrt(2) < max(clipped)
    bound = math.sqrt(clip_norm**2 * (1 - share) - 0.1**2)
    expected = torch.zeros(policy.dimension + 6, dtype=torch.float64)
    for user in (0, 2, 3):
        rows = np.flatnonzero(responses.user == user)
        gradient = gradient_of_user(policy, responses, weights, user)
        expected[:-6] += gradient * min(1.0, bound / float(gradient.norm()))
        mean = scores.values[rows].mean()
        expected[-6:-4] += 0.1 / math.sqrt(2) * torch.tensor([mean / R, 1.0])
        each = torch.stack([features[row] * scores.values[row] / R for row in rows])
        expected[-4:] += math.sqrt(share) * clip_norm * each.mean(0)
    assert relative_error(gate.sums[0].total, expected) < 1e-8
    assert relative_error(gate.sums[0].total[-4:], expected[-4:]) < 1e-8
    # In round 1 the server takes all of what was released.
    released = expected[-4:] / (math.sqrt(share) * clip_norm) * R
    assert relative_error(critic.w, critic.inverse @ released) < 1e-8
    assert round_.released is not None
    assert len(value_of(round_.released)) == policy.dimension
    assert round_.reward is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pg", "grpo", "ppo"])
def test_one_user_moves_the_joint_sum_by_the_clip_norm_at_most(name: str) -> None:
    policy = policy_of("gpt2", "lora")
    responses = batch_of(SHAPE, seed=9)
    values = np.where(responses.user == 2, R, 40 * scores_of(responses).values)  # broken scores
    values[np.flatnonzero(responses.user == 2)[0]] = -R
    scores = Scores(values, np.ones(len(values), dtype=bool), {})
    sums = {}
    for left_out in (None, *range(4)):
        critic = critic_of(policy)
        kept = [user for user in range(4) if user != left_out]
        round_, gate = round_of(
            policy,
            *some_users(responses, scores, kept),
            clip_norm=0.5,
            telemetry=TelemetryCoordinates(0.1, R),
            critic=critic,
        )
        UPDATES[name](round_, update_of(name))
        assert gate.sums[0].clip_norm == 0.5
        sums[left_out] = gate.sums[0].total
    moved = [float((sums[None] - sums[user]).norm()) for user in range(4)]
    assert max(moved) <= 0.5
    assert min(moved) > 0.01
    parts = [(sums[None] - sums[user])[-4:].norm() for user in range(4)]
    assert float(max(parts)) <= math.sqrt(0.2) * 0.5 * (1 + 1e-12)


def test_the_bound_of_the_coordinates_is_reached_and_never_passed() -> None:
    critic = critic_of(policy_of())
    random = np.random.default_rng(0)
    features = random.standard_normal((60, 4))
    features /= np.maximum(1, np.linalg.norm(features, axis=1, keepdims=True))
    user = random.integers(0, 9, 60)
    rewards = random.choice([-100.0, -R, 0, R, 100.0], 60)
    coordinates = critic.of_users(user, rewards, random.random(10) < 0.7, features)
    norms = np.linalg.norm(coordinates, axis=1)
    assert norms.max() <= critic.norm * (1 + 1e-12)
    assert norms[9] == 0  # a user without rows
    one = critic.of_users(np.zeros(1, int), np.array([R]), np.ones(1, bool), np.eye(1, 4))
    assert np.linalg.norm(one) == pytest.approx(math.sqrt(0.2) * 0.5, rel=1e-12)


def test_features_are_bounded_whatever_the_hidden_state() -> None:
    policy = policy_of()
    critic = critic_of(policy)
    found = critic.features(policy, public_prompts(30, seed=5))
    np.testing.assert_allclose(found[:, 0], 1 / math.sqrt(2))
    critic.directions[0] *= 1e200
    critic.directions[1] *= math.inf
    found = critic.features(policy, public_prompts(30, seed=5))
    assert (np.linalg.norm(found, axis=1) <= 1 + 1e-12).all()


@pytest.mark.parametrize("absent", [0, 5, 12])
def test_features_are_the_same_to_the_bit_without_another_user(absent: int) -> None:
    policy, prompts = policy_of(dtype=torch.float32), public_prompts(13, seed=6)
    critic = critic_of(policy)
    together = critic.features(policy, prompts)
    fewer = critic.features(policy, prompts[:absent] + prompts[absent + 1 :])
    assert np.array_equal(np.delete(together, absent, 0), fewer)


@pytest.mark.slow
def test_parts_of_the_users_add_up_and_every_process_gets_the_same_critic() -> None:
    policy = policy_of()
    responses = batch_of(SHAPE, seed=10)
    scores = scores_of(responses)
    sums, after = [], []
    for users in ([0, 1, 2, 3], [0, 3], [1, 2], []):
        critic = critic_of(policy)
        given = some_users(responses, scores, users)
        round_, gate = round_of(policy, *given, clip_norm=0.5, critic=critic)
        UPDATES["pg"](round_, update_of("pg"))
        sums.append(gate.sums[0].total)
        after.append(critic.w)
    assert relative_error(sums[1] + sums[2] + sums[3], sums[0]) < 1e-12
    assert relative_error(after[1] + after[2], after[0]) < 1e-12  # each took all of its release
    assert not after[3].any()  # an empty round, but it was released


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pg", "grpo", "ppo"])
def test_the_critic_moves_along_what_the_gate_gave_out(name: str) -> None:
    """Other users, whose sum differs, leave the same critic where the release is the same."""
    policy, after = policy_of(), []
    for seed in (10, 12):
        critic, responses = critic_of(policy), batch_of(SHAPE, seed=seed)
        scores = scores_of(responses, seed)
        round_, _ = round_of(policy, responses, scores, clip_norm=0.5, critic=critic)
        round_.gate = FixedGate(0.5)
        UPDATES[name](round_, update_of(name))
        after.append(critic.w)
    assert torch.equal(*after)
    assert not torch.equal(after[0], critic_of(policy).w)


# --- the cost ----------------------------------------------------------------------------------


def test_two_gaussians_of_the_shares_are_the_one_that_is_charged() -> None:
    """ε of the critic's and the policy's mechanisms, composed by dp-accounting, is that of z."""
    z, share = 2.0, 0.3
    accountant = PLDAccountant()
    for part in (share, 1 - share):
        accountant.compose(dp_accounting.GaussianDpEvent(z / math.sqrt(part)))
    made = make_plan(
        users=100, rounds=10, delta=1e-5, noise_multiplier=z, partition="fixed", clip_norm=0.5
    )
    assert accountant.get_epsilon(1e-5) == pytest.approx(made.guarantee.epsilon, rel=1e-3)


def test_the_noise_in_the_critic_is_that_of_its_share(tmp_path: Path) -> None:
    noised = dataclasses.replace(NO_NOISE.mechanism, noise_multiplier=1.5)
    plan = dataclasses.replace(NO_NOISE, mechanism=noised)
    critic = Critic(recipe.Critic(share=0.04, features=0), math.sqrt(0.04) * 0.5, R, 64, 8)
    ledger = Ledger(tmp_path / "ledger.jsonl", plan.terms())
    nothing = BoundedSum(torch.zeros(40_000, dtype=torch.float64), 0.5)
    released = value_of(Gate(plan, ledger, bytes(32)).release(1, nothing))
    ledger.close()
    in_units = released * plan.expected_batch_size / critic.norm
    assert float(in_units.std()) == pytest.approx(1.5 / math.sqrt(0.04), rel=0.02)


@pytest.mark.slow
def test_a_run_is_charged_as_without_a_critic(model: str, tmp_path: Path) -> None:
    """The golden charge: z calibrated to ε = 4 for ten users in a round, once a round."""
    common = {
        "epsilon": 4.0, "rounds": 2, "privacy__partition": "fixed", "learning_rate": 0.1,
        "prompts": [f"user {i}" for i in range(20)],
    }  # fmt: skip
    critic = {"features": 0, "share": 0.1}
    terms = []
    for name, update in (("with", {"update__critic": critic}), ("without", {})):
        result = train(model, tmp_path / name, **common, **update)
        entries = read_ledger(tmp_path / name / "ledger.jsonl")
        assert [e.body["round"] for e in entries if e.kind == "charge"] == [1, 2]
        for entry in entries:
            if entry.kind == "charge":
                assert entry.body["noise_multiplier"] == pytest.approx(1.0812, abs=1e-4)
                assert entry.body["releases_per_round"] == 1
        terms.append(result.plan)
    assert terms[0] == terms[1]
    card = json.loads((tmp_path / "with/privacy.json").read_text())
    assert "critic of 1 numbers in each round, in the same release: 0.1" in card["released"][-1]
    assert "at noise multiplier 3.419" in card["released"][-1]
    lines = (tmp_path / "with/metrics.jsonl").read_text().splitlines()
    values = [json.loads(line)["critic_value_noised"] for line in lines]
    kept = load_file(tmp_path / "with/checkpoint/critic.safetensors")
    assert values[-1] == float(kept["w"][0])
    assert not (tmp_path / "without/checkpoint/critic.safetensors").exists()


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["mlp", "un-noised", True, {"name": "value-head"}, 0.1])
@pytest.mark.parametrize("name", ["pg", "grpo", "ppo", "rebel", "npg"])
def test_a_critic_without_noise_is_refused_with_the_reason(name: str, critic: Any) -> None:
    message = refusal(recipe_settings(update={"name": name, "critic": critic}))
    assert "there is no critic but critic: noised" in message
    assert "would carry a round's users into later releases" in message
    assert "baseline: loo" in message


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"critic": "noised"}, "evaluation.data"),
        ({"critic": {"features": 0}, "baseline": "group"}, "baseline: loo"),
        ({"name": "grpo", "critic": {"features": 0}}, "scale_rewards: false"),
        ({"critic": {"features": 0, "share": 0.99}}, "reward_share"),
        ({"critic": {"share": 0}}, "update.critic.share"),
        ({"critic": {"feature": 0}}, "update.critic.features"),
    ],
)
def test_what_cannot_run_is_refused(update: dict[str, Any], message: str) -> None:
    assert message in refusal(recipe_settings(update=update))


def test_noised_is_short_for_its_defaults_and_a_dumped_recipe_reads_back() -> None:
    values = recipe_settings(update={"critic": "noised"}, evaluation={"data": {"path": "public"}})
    made = recipe.make_recipe(values)
    assert made.update.critic == recipe.Critic()  # type: ignore[union-attr]
    for again in (made, recipe.make_recipe(recipe_settings())):
        assert recipe.make_recipe(yaml.safe_load(recipe.dump_recipe(again))) == again


def test_too_few_public_prompts_are_refused() -> None:
    critic = Critic.from_plan(recipe.Critic(features=4), NO_NOISE, policy_of(), R, 64)
    with pytest.raises(DprlhfError, match=r"features 4 needs at least 16 .* gives 15"):
        critic.fit_features(policy_of(), public_prompts(15))


# --- runs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_sharp(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = [f"public {i}" for i in range(12)]
    common = {
        "epsilon": 8.0, "rounds": 3, "learning_rate": 0.05, "evaluation_prompts": public,
        "prompts": [f"user {i} says" for i in range(40)], "rollout__max_new_tokens": 4,
        "update__critic": {"features": 2, "share": 0.3},
    }  # fmt: skip
    train(model, tmp_path / "whole", **common)
    release = Gate.release

    def crash(self: Any, round_: int, bounded: Any) -> Any:
        if round_ == 3:
            raise MemoryError("crash")
        return release(self, round_, bounded)

    states = {}
    for name, forget in (("kept", False), ("forgotten", True)):
        with monkeypatch.context() as patch:
            patch.setattr("dprlhf.privacy.gate.Gate.release", crash)
            with pytest.raises(DprlhfError, match="resume"):
                train(model, tmp_path / name, **common)
        with monkeypatch.context() as patch:
            if forget:  # the control: a critic that starts anew
                patch.setattr("dprlhf.runs.checkpoint.load_file", without_critic)
            dprlhf.resume(
                tmp_path / name,
                prompts=common["prompts"],
                reward=lower_case,
                evaluation_prompts=public,
                quiet=True,
            )
        states[name] = [
            load_file(tmp_path / name / "checkpoint" / file)
            for file in ("policy.safetensors", "critic.safetensors")
        ]
    for file, kept, forgotten in zip(("policy", "critic"), *states.values(), strict=True):
        whole = load_file(tmp_path / "whole/checkpoint" / f"{file}.safetensors")
        assert all(torch.equal(whole[name], kept[name]) for name in whole)
        assert not all(torch.equal(whole[name], forgotten[name]) for name in whole)


def without_critic(path: Path) -> dict[str, torch.Tensor]:
    state = load_file(path)
    if path.name == "critic.safetensors":
        state["w"] = torch.zeros_like(state["w"])
    return state


# --- what it is good for -----------------------------------------------------------------------


@pytest.mark.slow
def test_without_noise_v_is_the_least_squares_fit() -> None:
    """On the public prompts themselves, and a mean over rounds with step sizes 1, 1/2, η."""
    policy, prompts = policy_of(), public_prompts(40)
    critic = critic_of(policy, step_size=0.4)
    features = critic.features(policy, prompts)
    random = np.random.default_rng(2)
    fits, users = [], np.arange(40)
    for round_ in (1, 2, 3):
        rewards = random.uniform(-R, R, 40)
        of_users = critic.of_users(users, rewards, np.ones(40, dtype=bool), features)
        critic.read(Released(torch.from_numpy(of_users.mean(0)), round_), round_)
        fits.append(np.linalg.lstsq(features, rewards, rcond=None)[0])
    expected = 0.6 * (fits[0] + fits[1]) / 2 + 0.4 * fits[2]
    np.testing.assert_allclose(critic.w.numpy(), expected, rtol=1e-9)
    assert critic.mean_value == pytest.approx(expected[0] / math.sqrt(2))
    assert np.abs(critic.values(1e3 * features)).max() == R


def test_before_its_first_release_it_has_no_part_in_the_advantages() -> None:
    policy, responses = policy_of(), batch_of(SHAPE, seed=11)
    scores, ones = scores_of(responses), np.ones(len(responses.user))
    critic = critic_of(policy, weight=1.0)
    weights = []
    for w in (torch.zeros(4, dtype=torch.float64), critic.w):
        critic.w = w
        round_, _ = round_of(policy, responses, scores, clip_norm=0.5, critic=critic)
        weights.append(open_private(round_advantage_weights(round_, "loo")))
    valid = open_private(round_.valid)
    np.testing.assert_array_equal(
        weights[0], advantage_weights(responses, scores, valid, ones, baseline="loo")
    )
    assert (weights[0] != weights[1]).all()


@pytest.fixture(scope="module")
def sharp(model: str) -> CausalLMPolicy:
    spec = recipe.Policy(model_name_or_path=model, adapter=ADAPTER)
    return load_policy(spec)


def two_kinds(policy: CausalLMPolicy, users: int, k: int, seed: int) -> tuple[Responses, Scores]:
    """Prompts of two kinds, whose rewards differ by 3 on average."""
    texts = [f"{10 + i % 89} {'aaaa' if i % 2 else 'zzzz'}" for i in range(users)]
    prompts = Prompts(texts, np.arange(users), np.zeros(users, np.int64), {})
    rollout = recipe.Rollout(responses=k, max_new_tokens=3)
    responses = sample(
        policy, prompts, rollout, key=bytes(32), context=(seed,), max_prompt_tokens=16
    )
    first = responses.tokens[:, -3].numpy()
    values = np.where(responses.prompt % 2, 1.5, -1.5) + 1.5 * (first % 3 - 1)
    return responses, Scores(values, np.ones(len(values), dtype=bool), {})


def variance(policy: CausalLMPolicy, responses: Responses, weights: Array) -> float:
    """The trace of the covariance of the users' contributions before clipping."""
    k = len(responses.user) // responses.users
    parts = user_gradients(policy, responses, weights, batch_size=120, rows=k)
    vectors = torch.cat([gradients[:, 0] for _, gradients, _ in parts]).double()
    return float(vectors.var(0).sum())


def learned(policy: CausalLMPolicy, k: int, features: int) -> Critic:
    """A critic after three rounds of 120 users, with the noise of z = 1."""
    plan = make_plan(
        users=360, rounds=3, delta=1e-3, noise_multiplier=1.0, clip_norm=0.5, partition="fixed"
    )
    spec = recipe.Critic(features=features, share=0.1, weight=1.0)
    critic = Critic.from_plan(spec, plan, policy, R, 64)
    public = [f"{i} {'aaaa' if i % 2 else 'zzzz'}" for i in range(40, 80)]
    critic.fit_features(policy, policy.encode(public, 16))
    generator = torch.Generator().manual_seed(0)
    for t in (1, 2, 3):
        responses, scores = two_kinds(policy, 120, k, t)
        round_, _ = round_of(
            policy, responses, scores, clip_norm=0.5, critic=critic, gate=NoisyGate(plan, generator)
        )
        round_.t = t
        UPDATES["pg"](round_, update_of("pg", batch_size=120))
    return critic


class NoisyGate(OpenGate):
    """Divides, and adds a plan's noise from a fixed generator."""

    def __init__(self, plan: Plan, generator: torch.Generator) -> None:
        super().__init__(plan.expected_batch_size)
        self._std, self._generator = plan.noise_std / plan.expected_batch_size, generator

    def __call__(self, bounded: BoundedSum) -> Released[torch.Tensor]:
        mean = value_of(super().__call__(bounded))
        noise = torch.randn(mean.shape, generator=self._generator, dtype=mean.dtype)
        return Released(mean + self._std * noise, 1)


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 8])
def test_on_rewards_that_prompts_decide_it_lowers_the_variance_of_the_update(
    sharp: CausalLMPolicy, k: int
) -> None:
    """Against no baseline always; against leave-one-out where V sees the prompt and k is 2."""
    responses, scores = two_kinds(sharp, 240, k, seed=9)
    everyone, ones = np.ones(240, dtype=bool), np.ones(len(responses.user))
    nothing = np.zeros(len(responses.user))
    of = {
        "none": advantage_weights(
            responses, scores, everyone, ones, baseline="loo", values=nothing, weight=1.0
        ),
        "loo": advantage_weights(responses, scores, everyone, ones, baseline="loo"),
    }
    for name, features in (("mean", 0), ("critic", 3)):
        critic = learned(sharp, k, features)
        round_, _ = round_of(sharp, responses, scores, clip_norm=0.5, critic=critic)
        of[name] = open_private(round_advantage_weights(round_, "loo"))
    measured = {name: variance(sharp, responses, weights) for name, weights in of.items()}
    assert measured["critic"] < 0.4 * measured["none"]
    assert measured["mean"] > 0.8 * measured["none"]  # the mean reward is about 0 here
    assert measured["mean"] > 2 * measured["loo"]  # a critic that does not see the prompt hurts
    if k == 2:
        assert measured["critic"] < 0.85 * measured["loo"]
    else:
        assert measured["critic"] > 0.9 * measured["loo"]  # eight responses leave it nothing
