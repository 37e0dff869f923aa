"""The clip norm from a trust region: formulas by simulation, the Fisher matrix by brute force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import DprlhfError, api, recipe, train
from dprlhf.data.public import in_memory_prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.privacy.plan import make_plan
from dprlhf.recipe import Adapter, TrustRegion
from dprlhf.rollout import Responses, sample
from dprlhf.updates.trust_region import clip_norm, fisher_trace_and_top, round_sizes
from helpers import tiny
from helpers.rounds import flat_gradient, token_logprobs

ETA, Z, M = 0.3, 0.8, 25.0


def squares(norm: float, dimension: int, draws: int = 40_000) -> np.ndarray:
    """‖Δ‖² of simulated steps whose mean gradient has the whole norm S."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(draws, dimension))
    steps = ETA * norm * Z / M * noise
    steps[:, 0] += ETA * norm
    return (steps**2).sum(1)


@pytest.mark.parametrize("dimension", [3, 200])
def test_l2_leaves_the_region_with_probability_beta(dimension: int) -> None:
    region = TrustRegion(trust_region="l2", alpha=0.02, beta=0.1)
    norm = clip_norm(
        region, learning_rate=ETA, noise_multiplier=Z, expected_batch_size=M, dimension=dimension
    )
    left = (squares(norm, dimension) / 2 > region.alpha).mean()
    assert abs(left - region.beta) < 4 * np.sqrt(0.1 * 0.9 / 40_000)
    further = (squares(1.02 * norm, dimension) / 2 > region.alpha).mean()
    assert further > left + 0.02  # the harness sees two percent


@pytest.mark.parametrize(
    ("partition", "users", "rounds", "dimension"),
    [("random-allocation", 1000, 20, 16), ("poisson", 300, 20, 16), ("fixed", 1010, 20, 500),
     ("random-allocation", 2000, 10, 1000)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["l2", "l2-markov"])
def test_rounds_of_more_users_than_the_mean_stay_in_the_region_as_often(
    kind: Any, partition: Any, users: int, rounds: int, dimension: int
) -> None:
    """The worst case: all of a round's gradients are clipped, and point in one direction."""
    region = TrustRegion(trust_region=kind, alpha=0.02, beta=0.1)
    plan = make_plan(
        users=users, rounds=rounds, delta=1e-5, noise_multiplier=Z, clip_norm=1.0,
        partition=partition,
    )  # fmt: skip
    m, draws = plan.expected_batch_size, 20_000

    def left(sizes: tuple[float, float]) -> float:
        norm = clip_norm(
            region, learning_rate=ETA, noise_multiplier=Z, expected_batch_size=m,
            dimension=dimension, sizes=sizes,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        count = rng.binomial(users, 1 / rounds, size=draws)
        if partition == "fixed":
            count[:] = m
        rest = Z / m * np.sqrt(rng.chisquare(dimension - 1, draws))
        along = count / m + Z / m * rng.normal(size=draws)
        return float(((ETA * norm) ** 2 * (along**2 + rest**2) / 2 > region.alpha).mean())

    error = np.sqrt(region.beta * (1 - region.beta) / draws)
    assert left(round_sizes(plan, region.beta)) < region.beta + 4 * error
    if kind == "l2" and partition != "fixed":
        assert left((1.0, 1.0)) > 0.3


def test_the_mean_square_of_a_rounds_size_is_that_of_a_binomial() -> None:
    plan = make_plan(
        users=300, rounds=20, delta=1e-5, noise_multiplier=Z, clip_norm=1.0, participations=2
    )
    sizes = np.random.default_rng(0).binomial(300, 0.1, size=400_000) / 30
    largest, square = round_sizes(plan, 0.1)
    assert square == pytest.approx((sizes**2).mean(), rel=3e-3)
    assert (sizes > largest).mean() <= 0.001 < (sizes > largest - 1 / 30).mean()


def test_markov_bounds_the_mean_square_and_is_below_the_quantile() -> None:
    settings: dict[str, Any] = {
        "learning_rate": ETA,
        "noise_multiplier": Z,
        "expected_batch_size": M,
        "dimension": 200,
    }
    alpha, beta = 0.02, 0.1
    norm = clip_norm(TrustRegion(trust_region="l2-markov", alpha=alpha, beta=beta), **settings)
    assert squares(norm, 200).mean() == pytest.approx(2 * alpha * beta, rel=0.01)
    exact = clip_norm(TrustRegion(trust_region="l2", alpha=alpha, beta=beta), **settings)
    assert norm < exact


def test_kl_with_the_identity_is_l2_markov() -> None:
    settings: dict[str, Any] = {
        "learning_rate": ETA,
        "noise_multiplier": Z,
        "expected_batch_size": M,
        "dimension": 7,
    }
    kl, l2 = (
        clip_norm(TrustRegion(trust_region=kind, alpha=0.1), **settings, fisher=(7.0, 1.0))
        for kind in ("kl", "l2-markov")
    )
    assert kl == l2


def test_without_noise_the_whole_step_is_the_clip_norm() -> None:
    region = TrustRegion(trust_region="l2", alpha=0.08)
    norm = clip_norm(
        region, learning_rate=0.5, noise_multiplier=0.0, expected_batch_size=M, dimension=9
    )
    assert (0.5 * norm) ** 2 / 2 == pytest.approx(region.alpha)


def made(prompts: int) -> tuple[CausalLMPolicy, Responses]:
    adapter = Adapter(type="ffa-lora", rank=2, target_modules=["c_attn"])
    policy = make_policy(tiny.model().double(), tiny.tokenizer(), adapter, seed=1)
    policy.model.double()
    responses = sample(
        policy,
        in_memory_prompts([f"film {i} was" for i in range(prompts)]),
        recipe.Rollout.model_construct(
            base_policy="on-policy", responses=1, max_new_tokens=5, temperature=1.0,
            batch_size=8, backend="transformers",
        ),
        key=bytes(32),
        context=("test",),
        max_prompt_tokens=16,
    )  # fmt: skip
    return policy, responses


def test_trace_and_top_eigenvalue_equal_those_of_the_matrix() -> None:
    policy, responses = made(12)
    rows = range(len(responses.user))
    scores = torch.stack(
        [flat_gradient(policy, token_logprobs(policy, responses, row).sum()) for row in rows]
    )
    fisher = scores.T @ scores / len(scores)
    trace, top = fisher_trace_and_top(policy, responses, batch_size=4)
    assert trace == pytest.approx(float(fisher.trace()), rel=1e-9)
    assert top == pytest.approx(float(torch.linalg.eigvalsh(fisher)[-1]), rel=2e-3)


def run(tmp_path: Path, **changes: Any) -> Any:
    settings = {
        "model": str(tiny.save(tmp_path / "model")),
        "prompts": [f"user {i} says" for i in range(60)],
        "data__max_prompt_tokens": 16,
        "evaluation_prompts": [f"guest {i} says" for i in range(30)],
        "evaluation__prompts": 10,
        "reward": lambda prompts, completions, **_: [float(len(c) % 5) for c in completions],
        "epsilon": 8.0,
        "rounds": 2,
        "policy__adapter": {"type": "ffa-lora", "target_modules": ["c_attn"]},
        "rollout__max_new_tokens": 4,
        "optimizer": {"name": "sgd", "learning_rate": 0.5},
        "quiet": True,
        **changes,
    }
    if settings.get("evaluation", {}) is None:
        del settings["evaluation__prompts"]  # a key of what is left out
    return train(**settings, output_dir=tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["l2", "l2-markov", "kl"])
def test_a_run_keeps_the_clip_norm_that_was_decided(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    region = {"trust_region": kind, "alpha": 0.01, "beta": 0.2}
    result = run(tmp_path, update__clip_norm=region, quiet=False)
    kept = api._recipe_in(result.folder).update.clip_norm
    assert isinstance(kept, float)
    assert kept == result.plan.clip_norm != 1.0
    assert ("tr F" in capsys.readouterr().out) == (kind == "kl")
    if kind == "l2-markov":
        z, m = result.plan.noise_multiplier, result.plan.expected_batch_size
        d, square = 2 * 96, 1 + (1 - m / result.plan.users) / m
        assert kept == pytest.approx(np.sqrt(2 * 0.01 * 0.2 / (square + (z / m) ** 2 * d)) / 0.5)


@pytest.mark.slow
def test_correlated_noise_counts_by_its_noisiest_round(tmp_path: Path) -> None:
    region = {"trust_region": "l2", "alpha": 0.01, "beta": 0.1}
    result = run(
        tmp_path, update__clip_norm=region, privacy__bands=3, privacy__partition="fixed", rounds=3
    )
    plan = result.plan
    most = max(plan.noise_std_of(t) for t in (1, 2, 3)) / plan.clip_norm
    assert most > 1.05 * plan.noise_multiplier
    assert plan.clip_norm == pytest.approx(
        clip_norm(
            TrustRegion.model_validate(region), learning_rate=0.5, noise_multiplier=most,
            expected_batch_size=plan.expected_batch_size, dimension=2 * 96,
            sizes=round_sizes(plan, 0.1),
        ), rel=1e-9,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("user_of", ["trust region", "adapter", "adapter with DoRA"])
def test_what_is_decided_before_the_first_round_is_decided_on_public_prompts(
    user_of: str, tmp_path: Path
) -> None:
    """Other private prompts, the same public ones: the same clip norm, and the same start."""
    public = [f"guest {i} says" for i in range(30)]
    changes: dict[str, Any] = {"update__clip_norm": {"trust_region": "kl", "alpha": 0.01}}
    if user_of.startswith("adapter"):
        adapter = {"type": "ffa-lora", "target_modules": ["c_attn"], "init": "public-activations"}
        changes = {"policy__adapter": adapter | {"use_dora": user_of.endswith("DoRA")}}
    decided = []
    for name, prompts in (("a", [f"user {i} says" for i in range(60)]), ("b", ["xyz!"] * 60)):
        (tmp_path / name).mkdir()
        result = run(
            tmp_path / name, prompts=prompts, evaluation_prompts=public, rounds=1, **changes
        )
        frozen = [w for n, w in result.policy.model.named_parameters() if "lora_A" in n]
        decided.append((result.plan.clip_norm, frozen))
    assert decided[0][0] == decided[1][0]
    assert frozen
    assert all(torch.equal(a, b) for a, b in zip(decided[0][1], decided[1][1], strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "adam"}}, "bounds a plain SGD step"),
        ({"evaluation_prompts": None, "evaluation": None}, "needs public prompts"),
        ({"update__name": "rebel"}, "a trust region is for the one step of pg, grpo or ppo"),
        ({"update__clip_norm": {"trust_region": "kl"}}, "alpha"),
        ({"update__clip_norm": -1.0}, "greater than 0"),
    ],
)
def test_a_trust_region_that_cannot_be_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {"update__clip_norm": {"trust_region": "kl", "alpha": 0.01}, **changes}
    with pytest.raises(DprlhfError, match=message):
        run(tmp_path, **given)
