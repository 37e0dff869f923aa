"""Control tasks: dynamics against Gymnasium, gradients against autograd, tables in miniature."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from dprlhf.boundary import Private, open_private
from dprlhf.privacy.accounting import gaussian_epsilon
from papers.control import bandits, tables
from papers.control.__main__ import main, write
from papers.control.environments import Dosing, Environment, Riverswim, make_environment
from papers.control.gym import Gymnasium, PlanarRobot
from papers.control.policies import (
    LinearAction,
    LogLinearSoftmax,
    MLPSoftmax,
    ScoredPolicy,
    TrajectoryPolicy,
    softmax,
)
from papers.control.tables import run_table
from papers.control.train import load, make, plan_of, train
from papers.control.trajectories import Trajectories, evaluate, simulate
from papers.control.ucbvi import Counting, PrivateCounts
from papers.control.updates import Advantage, ControlRound, advantages

RECIPES = Path(__file__).parents[2] / "recipes" / "control"
CARTPOLE = make_environment("cartpole")
KEY = hashlib.sha256(b"test").digest()


@pytest.mark.parametrize(("name", "bound"), [("cartpole", 0.05), ("acrobot", 0.1)])
def test_a_users_numbers_are_the_state_that_its_episode_starts_in(name: str, bound: float) -> None:
    env: Any = make_environment(name)
    numbers = np.linspace(0, 1, 5)[:, None].repeat(4, 1)
    states = np.array([row[0].state for row in env.reset(numbers)])
    assert np.allclose(states, bound * (2 * numbers - 1))


def test_riverswim_is_a_markov_chain_with_the_papers_numbers() -> None:
    env = Riverswim(0.6)
    assert np.allclose(env.transitions.sum(-1), 1)
    assert env.rewards[0, 0, 0] == 5 / 1000
    assert env.rewards[5, 1, 5] == 1
    right = np.tile([0.0, 1.0], (6, 1))
    assert env.best == pytest.approx(env.value(right), rel=0.02)
    assert Riverswim(0.9).best > env.best
    # The value of a policy is what its users get.
    policy = LogLinearSoftmax(6, 2)
    theta = np.repeat([0.0, 2.0], 6)
    returns = evaluate(env, policy, theta, (1,), 2048)
    expected = env.value(softmax(theta.reshape(2, 6).T))
    assert abs(returns.mean() - expected) < 4 * returns.std() / math.sqrt(2048)


def bergman(body: Any, dose: float, meal: float) -> list[float]:
    """The expanded minimal model as published, by minutes."""
    g, x, i, s1, s2, gut = body
    return [
        -3.17e-2 * (g - 291) - 2.9e-2 * x * g + 0.8 * 1.2e-2 / 12 * gut + 0.8 / 12 * meal,
        1.23e-2 * (i - x),
        -9e-2 * i + dose,
        dose - 0.18 * s1,
        -0.18 * (s2 - s1),
        0.18 * s2 - 1.2e-2 * gut,
    ]


@pytest.mark.parametrize("dose", [0.0, 3.0, 10.0])
def test_dosing_follows_its_equations(dose: float) -> None:
    from scipy.integrate import solve_ivp

    env = Dosing()
    state = env.reset(np.full((2, 26), 0.3))
    for _ in range(12):
        before = state[0, :6].copy()
        state, reward, ended = env.step(state, np.full((2, 1), dose), np.zeros((2, 0)))
        meal = state[0, 8]
        found = solve_ivp(
            lambda _, y, meal=meal: bergman(y, dose, meal),
            (0, 10), before, rtol=1e-8, atol=1e-8, method="LSODA",
        )  # fmt: skip
        assert np.allclose(state[0, :6], found.y[:, -1], rtol=2e-3, atol=0.05)
    assert not ended.any()
    assert (np.abs(reward) <= 1).all()
    if dose == 0:  # no insulin, high glucose
        assert (state[:, 0] > 105).all()
        assert (reward == -1).all()


POLICIES: dict[str, ScoredPolicy] = {
    "log-linear": LogLinearSoftmax(3, 4, (1.0, 2.0, 0.5)),
    "log-linear, ordered": LogLinearSoftmax(3, 4, (1.0, 2.0, 0.5), (-1.0, 0.0, 0.5, 2.0)),
    "log-linear, one left out": LogLinearSoftmax(3, 4, (0.0, 2.0, 0.5)),
    "mlp": MLPSoftmax(3, 4, 5),
}


def torch_logprob(name: str, policy: Any, theta: torch.Tensor, x: Any, a: Any) -> torch.Tensor:
    """log π(a|s) of one step, written again with torch."""
    x = torch.as_tensor(x)
    if policy.scale:
        x = x * torch.tensor(policy.scale, dtype=torch.float64)
    if name == "log-linear":
        logits = theta.view(4, 3) @ x
    elif name == "log-linear, ordered":
        logits = torch.tensor(policy.levels).double() * (theta @ x)
    elif name == "log-linear, one left out":
        logits = theta.view(4, 2) @ x[1:]
    else:
        first, first_bias, last, last_bias = theta.split([15, 5, 20, 4])
        hidden = torch.relu(first.view(5, 3) @ x + first_bias)
        logits = last.view(4, 5) @ hidden + last_bias
    return torch.log_softmax(logits, 0)[int(a)]


@pytest.mark.parametrize("name", POLICIES)
def test_per_trajectory_gradients_are_autograds(name: str) -> None:
    policy = POLICIES[name]
    rng = np.random.default_rng(1)
    theta = policy.initial(rng) + 0.3 * rng.normal(size=policy.dimension)
    seen, weights = rng.normal(size=(2, 3, 3)), rng.normal(size=(2, 3))
    actions = policy.act(theta, seen.reshape(6, 3), rng.random((6, policy.draws)))
    actions = actions.reshape(2, 3, *actions.shape[1:])
    got = policy.weighted_scores(theta, seen, actions, weights)
    scores = policy.scores(theta, seen, actions)
    for u in range(2):
        parameter = torch.tensor(theta, requires_grad=True)
        each = [torch_logprob(name, policy, parameter, seen[u, t], actions[u, t]) for t in range(3)]
        total = sum(w * e for w, e in zip(weights[u], each, strict=True))
        (expected,) = torch.autograd.grad(total, parameter, retain_graph=True)  # type: ignore[arg-type]
        assert np.allclose(got[u], expected.numpy(), rtol=1e-9, atol=1e-12)
        (first,) = torch.autograd.grad(each[0], parameter)
        assert np.allclose(scores[u, 0], first.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy", [*POLICIES.values(), LinearAction(3, 2, shift=(0.1, 0.2, 0.3))])
def test_a_parameter_vector_for_each_user_acts_as_one_for_all(policy: TrajectoryPolicy) -> None:
    rng = np.random.default_rng(2)
    theta = rng.normal(size=policy.dimension)
    seen, uniforms = rng.normal(size=(7, 3)), rng.random((7, policy.draws))
    one = policy.act(theta, seen, uniforms)
    each = policy.act(np.tile(theta, (7, 1)), seen, uniforms)
    assert np.allclose(one, each)


def test_a_user_does_not_depend_on_the_others() -> None:
    policy = MLPSoftmax(4, 2, 8)
    theta = policy.initial(np.random.default_rng(0))
    alone = simulate(CARTPOLE, policy, theta, [(5, 3)])[0]
    among = simulate(CARTPOLE, policy, theta, [(5, u) for u in range(70)])[0]
    for name in ("observations", "actions", "rewards"):
        assert np.array_equal(getattr(alone, name)[0], getattr(among, name)[3])
    weights = among.mask.astype(float)
    both = policy.weighted_scores(theta, among.observations, among.actions, weights)[3]
    one = policy.weighted_scores(
        theta, alone.observations, alone.actions, alone.mask.astype(float)
    )[0]
    assert np.array_equal(one, both)


class Odd:
    """A Gymnasium environment that misbehaves at its reset or from its third step on."""

    def __init__(self, how: str) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.how = how
        self.broken = False

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        self.bad, self.count = seed % 2 == 0, 0
        self.broken = self.broken or (self.bad and self.how == "breaks")
        if self.broken or (self.bad and self.how == "raises at reset"):
            raise RuntimeError("a secret")
        return np.zeros(2), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        reward = 0.5
        if self.bad and self.count == 3:
            if self.how == "raises":
                raise RuntimeError("a secret")
            reward = 7.0
        return np.ones(2), reward, False, self.how == "cut" and self.count == 3, {}


def odd(how: str) -> Gymnasium:
    return Gymnasium("odd", 6, 1.0, make=lambda: Odd(how))


@pytest.mark.parametrize("how", ["raises", "raises at reset"])
def test_an_environment_that_raises_makes_its_user_contribute_zero(how: str) -> None:
    policy = LogLinearSoftmax(2, 2)
    chunk = simulate(odd(how), policy, np.zeros(4), [(0, u) for u in range(8)])[0]
    failed = chunk.steps[:8] == 0
    assert 0 < failed.sum() < 8
    scores = policy.weighted_scores(np.zeros(4), chunk.observations, chunk.actions, chunk.rewards)
    assert not scores[:8][failed].any()


def test_an_environment_that_broke_under_one_user_is_not_anothers() -> None:
    environment, policy = odd("breaks"), LogLinearSoftmax(2, 2)
    alone = [simulate(odd("breaks"), policy, np.zeros(4), [(0, u)])[0].steps[0] for u in range(8)]
    assert 0 < np.count_nonzero(alone) < 8
    for _ in range(2):
        after = [simulate(environment, policy, np.zeros(4), [(0, u)])[0].steps[0] for u in range(8)]
        assert after == alone


def robot(**changes: Any) -> PlanarRobot:
    return PlanarRobot("Hopper-v5", 12, 10.0, trunk=True, period=0.04, stiffness=2.0, **changes)


def test_a_robot_holds_the_positions_that_the_policy_asks_for() -> None:
    """Against a loop of its own over Gymnasium's robot; the second user meets a used instance."""
    environment = robot()
    policy = LinearAction(7, 3)
    theta = np.random.default_rng(0).normal(size=policy.dimension)
    weight, offset = theta[:21].reshape(3, 7), theta[21:]
    for user in range(2):
        plain: Any = gymnasium.make("Hopper-v5").unwrapped
        chunk = simulate(environment, policy, theta, [(0, user)])[0]
        uniform = np.random.default_rng((0, user)).random(1)[0] + 2.0**-54
        seen, _ = plain.reset(seed=int(uniform * 2**31))
        rewards = []
        for step in range(12):
            phase = 2 * np.pi * step * 0.008 / 0.04  # a step of the robot takes 8 ms
            # height, angle; three of the trunk's velocities come between the joints and theirs
            sees = [*seen[[0, 1, 5, 6, 7]], np.sin(phase), np.cos(phase)]
            torque = 2.0 * (offset + weight @ sees - seen[2:5]) - 0.05 * seen[8:11]
            seen, reward, ended, _, _ = plain.step(np.clip(torque, -1, 1))
            rewards.append(reward)
            if ended:
                break
        assert chunk.steps[0] == len(rewards) > 3
        assert np.allclose(chunk.rewards[0, : len(rewards)], rewards, rtol=1e-9)


def test_rewards_out_of_range_are_clipped() -> None:
    chunk = simulate(odd("large"), LogLinearSoftmax(2, 2), np.zeros(4), [(0, u) for u in range(8)])
    assert chunk[0].rewards.max() == 1.0


def test_an_episode_that_the_environment_cuts_is_no_longer_and_has_not_ended_by_itself() -> None:
    seeds = [(0, u) for u in range(8)]
    chunk = simulate(odd("cut"), LogLinearSoftmax(2, 2), np.zeros(4), seeds)[0]
    assert chunk.steps[:8].tolist() == [3] * 8
    assert not chunk.terminated.any()


def small(**changes: Any) -> Any:
    base: dict[str, Any] = {
        "environment": "cartpole", "users": 40, "rounds": 4, "privacy": {"epsilon": 3.0},
        "policy": {"type": "log-linear"},
        "update": {"name": "pg", "advantage": {"discount": 0.9, "reference": 1.0}},
        "evaluation_episodes": 8,
    }  # fmt: skip
    return make(base, changes)


def test_the_plan_is_the_shared_one_and_releases_are_counted() -> None:
    plan = plan_of(small())
    assert plan.adjacency == "zero-out"
    assert plan.guarantee.epsilon <= 3.0
    assert "random allocation" in plan.guarantee.accountant
    npg = {"name": "npg", "oracle": {"name": "projected-sgd", "steps": 3}}
    three = plan_of(small(update=npg))
    assert three.releases_per_round == 3
    assert three.noise_multiplier > plan.noise_multiplier
    stream = plan_of(small(privacy={"epsilon": 3.0, "partition": "stream"}))
    assert stream.expected_batch_size == 10
    assert gaussian_epsilon(stream.noise_multiplier, 1e-5) == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize("baseline", ["batch", "critic"])
def test_the_papers_own_baselines_state_no_epsilon(baseline: str) -> None:
    recipe = small(**{"update.advantage.baseline": baseline})
    outcome = train(recipe, key=KEY, seed=0)
    assert outcome.plan.guarantee.epsilon == math.inf
    assert outcome.plan.guarantee.accountant.startswith("not private: ")
    assert not outcome.plan.private


def contributions(chunks: list[Trajectories], baseline: str) -> np.ndarray[Any, Any]:
    """Each user's gradient, as the update computes it."""
    policy = LogLinearSoftmax(4, 2)
    round_ = ControlRound(1, policy, torch.zeros(8), Private(chunks), None, None, None, {})  # type: ignore[arg-type]
    spec = Advantage(discount=0.9, reference=1.0, baseline=baseline)  # type: ignore[arg-type]
    weights = open_private(advantages(round_, spec))
    rows = [
        policy.weighted_scores(np.zeros(8), c.observations, c.actions, w)[: c.users]
        for c, w in zip(chunks, weights, strict=True)
    ]
    return np.concatenate(rows)


@pytest.mark.parametrize(("baseline", "alone"), [("public", True), ("batch", False)])
def test_a_contribution_depends_on_one_user_alone_unless_it_is_labelled(baseline, alone):
    def of(seeds: list[tuple[int, ...]]) -> np.ndarray[Any, Any]:
        chunks = simulate(CARTPOLE, LogLinearSoftmax(4, 2), np.zeros(8), seeds)
        return contributions(chunks, baseline)[0]

    same = np.array_equal(of([(0, 0), (0, 1)]), of([(0, 0), (0, 2)]))
    assert same == alone


def test_noise_is_added_once_and_only_by_the_plan() -> None:
    """The released gradient less the noiseless one has the plan's standard deviation."""
    moved = []
    for seed in range(2):
        for epsilon in (0.05, math.inf):
            recipe = small(rounds=1, **{"privacy.epsilon": epsilon, "policy.type": "mlp",
                                        "optimizer.learning_rate": 1.0})  # fmt: skip
            outcome = train(recipe, key=KEY, seed=seed)
            moved.append(outcome.theta)
            if epsilon < 1:
                std = outcome.plan.noise_std / outcome.plan.expected_batch_size
    noise = np.concatenate([moved[0] - moved[1], moved[2] - moved[3]])
    assert noise.std() == pytest.approx(std, rel=0.12)


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_private_counts_have_the_noise_of_the_binary_mechanism(mechanism: str) -> None:
    scale, episodes = 2.0, 14
    counts = PrivateCounts((4000,), episodes, scale, mechanism, np.random.default_rng(0))
    each = scale * (math.sqrt(2) if mechanism == "laplace" else 1)
    for k in range(1, episodes + 1):
        counts.add(np.ones(4000))
        noise = counts.released - k
        assert noise.mean() == pytest.approx(0, abs=0.3)
        assert noise.std() == pytest.approx(each * math.sqrt(k.bit_count()), rel=0.1)
    assert counts.noise_std == pytest.approx(each * math.sqrt(4))


def test_one_user_is_in_at_most_depth_partial_sums() -> None:
    """Sensitivity: which of the partial sums of 1..K hold episode j."""
    episodes = 13
    depth = episodes.bit_length()
    spans = []
    for k in range(1, episodes + 1):
        low = k & -k
        spans.append((k - low + 1, k))
    for j in range(1, episodes + 1):
        assert 1 <= sum(a <= j <= b for a, b in spans) <= depth
    # Hence the scale: 3 families, H counters of each, depth sums.
    assert Counting(1.0).scale(20, episodes) == 3 * 20 * depth
    z = Counting(1.0, mechanism="gaussian").scale(20, episodes) / math.sqrt(3 * 20 * depth)
    assert gaussian_epsilon(z, 1e-5) == pytest.approx(1.0, rel=1e-4)
    assert Counting(math.inf).scale(20, episodes) == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_runs(path: Path) -> None:
    tiny = {"users": 6, "rounds": 2, "evaluation_episodes": 2}
    environment: Environment | None = None
    if path.stem == "halfcheetah":
        environment = PlanarRobot("HalfCheetah-v5", 20, 10.0, period=0.25)
    if path.stem == "hopper":
        environment = PlanarRobot("Hopper-v5", 20, 10.0, trunk=True)
    outcome = train(load(path, tiny), key=KEY, seed=0, environment=environment)
    assert np.isfinite(outcome.returns).all()
    assert outcome.plan.private


@pytest.mark.slow
def test_the_tables_run_in_miniature_and_write_everything(tmp_path, monkeypatch):
    tiny = {"users": 8, "rounds": 2, "evaluation_episodes": 2}
    monkeypatch.setattr(tables, "RIVERSWIM_EPISODES", 30)
    cache, found = tmp_path / "cache", {}
    arguments: dict[str, Any] = {"seeds": 2, "recipes": RECIPES, "cache": cache, "quiet": True}
    found["hz"] = run_table("hz", only="cartpole/pg/log-linear", changes=tiny, **arguments)
    found["rio"] = run_table("rio", only="dosing-0", changes=tiny, **arguments)
    pairs = run_table("riverswim", only="pgpe", changes={"rounds": 3}, **arguments)
    pairs += run_table("riverswim", only="ucb-vi-laplace/bonus=0.01", **arguments)
    found["riverswim"] = pairs
    done = {path: path.stat().st_mtime_ns for path in cache.glob("*.json")}
    assert run_table("hz", only="cartpole/pg/log-linear", changes=tiny, **arguments) == found["hz"]
    assert done == {path: path.stat().st_mtime_ns for path in cache.glob("*.json")}
    text = write(found, tmp_path / "docs", "a command", 2)
    rows = json.loads((tmp_path / "docs" / "results" / "control.json").read_text())
    names = {row["name"] for row in rows}
    assert "control/cartpole/pg/log-linear/epsilon=3" in names
    assert "control/riverswim-0.6/pgpe-blind/epsilon=1/over best UCB-VI" in names
    assert all(row["command"] == "a command" for row in rows)
    assert "| cartpole/pg/log-linear/epsilon=1 (log-linear policy) | 8 | 1 |" in text


def test_the_command_runs_what_is_asked_and_writes_it(tmp_path: Path, capsys: Any) -> None:
    words = ["--table", "hz", "--only", "bandit/pg/epsilon=4/users=500", "--seeds", "1"]
    main([*words, "--jobs", "1", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "results" / "control.json").read_text())
    assert {row["name"].rpartition("/")[2] for row in rows} == {"slope", "suboptimality"}
    assert {row["command"] for row in rows} == {"python -m papers.control --table hz --seeds 1"}
    with pytest.raises(SystemExit):
        main(["--seeds", "0"])
    assert "1 or more" in capsys.readouterr().err


def test_the_bandits_rewards_are_realizable_and_their_optimum_is_known() -> None:
    bandit = bandits.Bandit.make(3, 4, 0)
    assert bandit.suboptimality(1e3 * bandit.truth) == pytest.approx(0, abs=1e-3)
    assert bandit.suboptimality(np.zeros(3)) > 0.2
    scores, rewards = bandit.users(np.random.default_rng(0), 20_000, np.zeros(3))
    pair = scores[:, 0] - scores[:, 1]
    fitted = np.linalg.lstsq(pair, rewards[:, 0] - rewards[:, 1])[0]
    assert np.allclose(fitted, bandit.truth, atol=0.02)
