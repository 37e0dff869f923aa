"""DP-PPO: batched local training against a plain loop over users with a policy of their own."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dprlhf import DprlhfError, recipe
from dprlhf.boundary import Private, open_private
from dprlhf.gradients.subspace import Subspace
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rewards import Scores
from dprlhf.rollout import Responses
from dprlhf.updates import UPDATES, PrivateRound
from dprlhf.updates.pg import LARGEST_RATIO
from dprlhf.updates.ppo import local_copies, ppo, project
from dprlhf.updates.public_gradients import public_gradients
from dprlhf.updates.telemetry import TelemetryCoordinates
from helpers import tiny
from helpers.autograd import relative_error
from helpers.batches import MIXED, Shape, batch_of, half_from_base
from helpers.policies import policy_of
from helpers.rounds import OpenGate, flat_parameters, random_scores, round_of, token_logprobs

RATE = "LOCAL_LEARNING_RATE"  # the package names the function, so attributes lead to no module


def spec_of(**values: Any) -> recipe.PPO:
    return recipe.PPO.model_validate({"name": "ppo", "batch_size": 12, **values})


def joined(parameters: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in parameters])


def train_alone(policy, responses, scores, user, spec, radius, project_at="every step"):
    """θ − θ₀ of one user, by torch's own optimizers on a policy of its own, ``[dimension]``."""
    own = copy.deepcopy(policy.model)
    parameters = [p for p in own.parameters() if p.requires_grad]
    start = joined(parameters)
    rows = np.flatnonzero(responses.user == user)
    k = len(responses.user) // len(responses.prompts)
    tokens, advantages, old = [], [], []
    for row in rows:
        of_prompt = scores.values[row - row % k : row - row % k + k]
        advantage = (scores.values[row] * k - of_prompt.sum()) / (k - 1)
        with torch.no_grad():
            logprobs = token_logprobs(policy, responses, row)
            current = logprobs
            if responses.from_base[row]:
                with policy.base():
                    base = token_logprobs(policy, responses, row)
                current = torch.maximum(base, logprobs - math.log(LARGEST_RATIO))
        for t in range(len(logprobs)):
            tokens.append((row, t))
            advantages.append(advantage * float((logprobs[t] - current[t]).exp()))
            old.append(logprobs[t])
    optimizer = torch.optim.SGD(parameters, ppo.__globals__[RATE], maximize=True)
    for _ in range(spec.epochs):
        now = {row: token_logprobs(policy, responses, row, own) for row in rows}
        terms = []
        for (row, t), advantage, before in zip(tokens, advantages, old, strict=True):
            ratio = (now[row][t] - before).exp()
            term = ratio * advantage
            if spec.clip_range is not None:
                lowest, highest = 1 - spec.clip_range, 1 + spec.clip_range
                term = torch.minimum(term, ratio.clamp(lowest, highest) * advantage)
            terms.append(term)
        optimizer.zero_grad()
        (torch.stack(terms).sum() / len(rows)).backward()
        optimizer.step()
        if project_at == "every step":
            put_back(parameters, start, radius)
    put_back(parameters, start, radius)
    return joined(parameters) - start


@torch.no_grad()
def put_back(parameters: list[torch.Tensor], start: torch.Tensor, radius: float) -> None:
    """θ ← θ₀ + Clip(θ − θ₀, S)."""
    move = joined(parameters) - start
    move = start + move * min(1.0, radius / max(float(move.norm()), 1e-300))
    for p, piece in zip(
        parameters, torch.split(move, [p.numel() for p in parameters]), strict=True
    ):
        p.copy_(piece.reshape(p.shape))


def train_together(
    policy: CausalLMPolicy,
    responses: Responses,
    scores: Scores,
    spec: recipe.PPO,
    clip_norm: float,
    telemetry: TelemetryCoordinates | None = None,
    prepare: Callable[[PrivateRound], None] = lambda round_: None,
) -> tuple[torch.Tensor, PrivateRound, OpenGate]:
    """One round of the update: each user's vector ``[users, dimension]``, the round, its gate.

    The gate lets the sum through as it is, and the server's learning rate is 0. ``prepare`` may
    give the round what it has besides.
    """
    round_, gate = round_of(policy, responses, scores, clip_norm=clip_norm, telemetry=telemetry)
    prepare(round_)
    of_users = torch.zeros(responses.users, policy.dimension, dtype=torch.float64)
    clipped_vectors = round_.clipped_vectors

    def seen(vectors: Private[Any]) -> Any:
        batches = list(open_private(vectors))
        for users, moves in batches:
            real = users >= 0
            of_users[users[real]] = project(moves[real].double(), round_.vector_clip_norm)
        return clipped_vectors(Private(batches))

    round_.clipped_vectors = seen  # type: ignore[method-assign]
    ppo(round_, spec)
    return of_users, round_, gate


CASES: dict[str, dict[str, Any]] = {
    "one step": {},
    "epochs": {"epochs": 3},
    "clip range": {"epochs": 3, "clip_range": 0.1},
    "reference": {"epochs": 2},
    "reference clip range": {"epochs": 2, "clip_range": 0.1},
}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradient_checkpointing_changes_no_bit_of_a_move(kind: tiny.Kind) -> None:
    """A checkpointed layer runs again in the backward pass, and must find the copies there."""
    responses = batch_of(MIXED, seed=3)
    scores, spec = random_scores(responses), spec_of(**CASES["epochs"])
    expected, _, _ = train_together(policy_of.__wrapped__(kind), responses, scores, spec, 1.0)
    policy = policy_of.__wrapped__(kind)
    policy.checkpoint_layers()
    found, _, _ = train_together(policy, responses, scores, spec, 1.0)
    assert expected.abs().max() > 0
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapter", "case"),
    [
        *(("gpt2", "lora", case) for case in CASES if case != "reference"),
        ("llama", "ffa-lora", "clip range"),
        ("llama", "lora", "epochs"),
    ],
)
def test_equals_a_loop_over_users_with_policies_of_their_own(kind, adapter, case, monkeypatch):
    """Users with one and two prompts, two padded widths, ragged responses, some clipped."""
    monkeypatch.setitem(ppo.__globals__, RATE, 0.3)
    policy = policy_of(kind, adapter)
    spec = spec_of(**CASES[case])
    shape = Shape([[5, 1], [2], [18]], k=2, length=4)
    responses = batch_of(shape, seed=3, shuffled=True)
    if case.startswith("reference"):
        responses = half_from_base(responses)
    scores = random_scores(responses)
    before = flat_parameters(policy)
    free, _, _ = train_together(policy, responses, scores, spec, math.inf)
    radius = float(free.norm(dim=1).median())
    measured, round_, gate = train_together(policy, responses, scores, spec, radius)
    truth = torch.stack(
        [
            train_alone(policy, responses, scores, user, spec, radius)
            for user in range(responses.users)
        ]
    )
    norms = truth.norm(dim=1)
    assert (norms > radius * (1 - 1e-9)).any()
    for mine, other in zip(measured, truth, strict=True):
        assert relative_error(mine, other) < 1e-9
    # What is released is their sum, and the policy itself has not moved.
    assert relative_error(gate.sums[0].total, truth.sum(0)) < 2e-9
    assert torch.equal(flat_parameters(policy), before)
    assert (open_private(round_.norms) > radius).any()


@pytest.mark.parametrize("baseline", ["loo", "paired", "group"])
@pytest.mark.parametrize("learning_rate", [0.1, 2.0])
def test_one_sgd_step_on_all_tokens_is_the_policy_gradient(baseline, learning_rate, monkeypatch):
    """The sum of clip(lr · g_u, S) is lr times that of clip(g_u, S / lr)."""
    monkeypatch.setitem(ppo.__globals__, RATE, learning_rate)
    policy = policy_of()
    responses = batch_of(MIXED, seed=5, shuffled=True)
    scores = random_scores(responses)
    clip_norm = 1.5
    pg_round, pg_gate = round_of(policy, responses, scores, clip_norm=clip_norm / learning_rate)
    UPDATES["pg"](pg_round, recipe.PG.model_validate({"baseline": baseline}))
    spec = spec_of(baseline=baseline)
    _, _, gate = train_together(policy, responses, scores, spec, clip_norm)
    assert relative_error(gate.sums[0].total, learning_rate * pg_gate.sums[0].total) < 1e-9
    assert UPDATES["ppo"] is ppo


def test_it_projects_after_every_step_and_not_only_at_the_end(monkeypatch):
    monkeypatch.setitem(ppo.__globals__, RATE, 2.0)
    policy = policy_of()
    responses = batch_of(Shape([[3], [5]], k=2, length=4), seed=1)
    scores = random_scores(responses)
    spec = spec_of(epochs=4)
    radius = 0.5
    measured, _, _ = train_together(policy, responses, scores, spec, radius)
    for how, same in (("every step", True), ("the end", False)):
        truth = torch.stack(
            [
                train_alone(policy, responses, scores, u, spec, radius, project_at=how)
                for u in range(2)
            ]
        )
        assert (truth.norm(dim=1) > 0.999 * radius).all()
        assert (relative_error(measured, truth) < 1e-9) == same
        assert (relative_error(measured, truth) > 1e-2) == (not same)


def test_the_joint_vector_keeps_within_the_clip_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Telemetry has its part e; the move's radius is √(S² − e²), in every step."""
    monkeypatch.setitem(ppo.__globals__, RATE, 100.0)
    policy = policy_of()
    responses = batch_of(Shape([[3, 6]], k=2, length=4), seed=1)
    scores = Scores(np.array([3.0, 3.0, 3.0, 2.9]), np.ones(4, dtype=bool), {})
    telemetry = TelemetryCoordinates(0.6, 3.0)
    spec = spec_of(epochs=3)
    _, round_, gate = train_together(policy, responses, scores, spec, 1.0, telemetry=telemetry)
    assert round_.vector_clip_norm == 1.0  # after the release the telemetry is out
    total = gate.sums[0].total
    assert 0.99 < float(total.norm()) <= 1.0
    assert 0.8 * (1 - 1e-8) < float(total[:-2].norm()) <= 0.8
    assert 0.59 < float(total[-2:].norm()) <= 0.6
    truth = train_alone(policy, responses, scores, 0, spec, 0.8)
    assert relative_error(total[:-2], truth) < 1e-8


def test_a_user_that_comes_twice_is_refused() -> None:
    policy = policy_of()
    responses = batch_of(MIXED, seed=0)
    round_, _ = round_of(policy, responses, random_scores(responses), clip_norm=1.0)
    vector = torch.zeros(1, policy.dimension)
    twice = Private([(np.array([2]), vector), (np.array([2]), vector)])
    with pytest.raises(ValueError, match="twice"):
        round_.clipped_vectors(twice)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("adapter", ["lora", "ffa-lora"])
def test_each_users_rows_see_their_own_copy(kind: tiny.Kind, adapter: str) -> None:
    policy = policy_of(kind, adapter)
    responses = batch_of(Shape([[3, 5], [2, 2], [4, 1]], k=1, length=4), seed=2)
    tokens, mask = responses.micro_batch(np.arange(6))
    generator = torch.Generator().manual_seed(0)
    moves = torch.randn(3, policy.dimension, dtype=torch.float64, generator=generator)
    hooks = [len(m._forward_hooks) for m in policy.model.modules()]
    with torch.no_grad():
        plain = policy.response_logprobs(tokens, mask, 4)
        with local_copies(policy.model, policy.parameters, moves, 6):
            together = policy.response_logprobs(tokens, mask, 4)
            helping = policy.model(input_ids=tokens[:1, -1:]).logits
            with pytest.raises(DprlhfError, match="does not get a batch's rows first"):
                policy.response_logprobs(tokens[:4], mask[:4], 4)
            with policy.base():
                base = policy.response_logprobs(tokens, mask, 4)
        with policy.base():
            assert torch.equal(base, policy.response_logprobs(tokens, mask, 4))
        for user in range(3):
            moved = copy.deepcopy(policy.model)
            offset = 0
            for name, p in moved.named_parameters():
                if name in policy.parameters:
                    p += moves[user, offset : offset + p.numel()].reshape(p.shape)
                    offset += p.numel()
            for row in (2 * user, 2 * user + 1):
                alone = token_logprobs(policy, responses, row, moved)
                torch.testing.assert_close(together[row, : len(alone)], alone)
                assert (together[row] - plain[row]).abs().max() > 1e-2
        torch.testing.assert_close(helping, policy.model(input_ids=tokens[:1, -1:]).logits)
    assert [len(m._forward_hooks) for m in policy.model.modules()] == hooks


def test_local_moves_have_no_radius_in_a_subspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip norm is the unit of the coordinates there; a full move has another length."""
    monkeypatch.setitem(ppo.__globals__, RATE, 0.5)
    subspace = {"rank": 2, "prompts": 8, "data": {"path": "public.csv"}}
    policy, spec = policy_of(), spec_of(epochs=3, subspace=subspace)
    responses = batch_of(MIXED, seed=3)
    generator = torch.Generator().manual_seed(1)
    some = torch.randn(policy.dimension, 2, dtype=torch.float64, generator=generator)
    found, public = [], []
    for clip_norm in (1e-3, 1e3):
        # Nor have those of the public users to whom directions and scale are fitted.
        public.append(
            public_gradients(
                policy, responses, random_scores(responses), reward_range=3.0, t=1, kl=recipe.KL(),
                update=spec.model_copy(update={"clip_norm": clip_norm}),
                optimizer=torch.optim.SGD(policy.parameters.values()),
            )
        )  # fmt: skip
        round_, gate = round_of(policy, responses, random_scores(responses), clip_norm=clip_norm)
        round_.subspace = Subspace(torch.linalg.qr(some)[0].T, scale=clip_norm * 1e-3)
        ppo(round_, spec)
        found.append(gate.sums[0].total / (clip_norm * 1e-3))
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)
    torch.testing.assert_close(*public, rtol=1e-9, atol=0)
    assert public[0].norm(dim=1).max() > 1.0


def test_nothing_is_left_in_the_model_after_an_interruption() -> None:
    policy = policy_of()
    responses = batch_of(MIXED, seed=5)
    before = [len(m._forward_hooks) for m in policy.model.modules()]
    ticks: list[int] = []

    def tick(rows: int) -> None:
        ticks.append(rows)
        if len(ticks) == 2:
            raise KeyboardInterrupt

    round_, gate = round_of(policy, responses, random_scores(responses), clip_norm=1.0)
    round_.tick = tick
    with pytest.raises(KeyboardInterrupt):
        ppo(round_, spec_of(batch_size=3))
    assert not gate.sums
    assert [len(m._forward_hooks) for m in policy.model.modules()] == before
    assert all(p.grad is None and p.requires_grad for p in policy.parameters.values())
    round_.tick = ticks.append
    ticks.clear()
    ppo(round_, spec_of(batch_size=3))
    assert sum(ticks) == len(responses.user)


@pytest.mark.parametrize(
    ("trained", "layer"),
    [
        ("ln_f.weight", "LayerNorm"),
        ("wte.weight", "Embedding"),
        ("c_attn.base_layer.bias", "Conv1D"),
    ],
)
def test_other_trainable_parameters_are_refused_by_name(trained: str, layer: str) -> None:
    model = make_policy(tiny.model("gpt2"), tiny.tokenizer(), recipe.Adapter(rank=1)).model
    for name, parameter in model.named_parameters():
        if name.endswith(trained):
            parameter.requires_grad_(True)
    policy = CausalLMPolicy(model, tiny.tokenizer())
    responses = batch_of(MIXED, seed=5)
    round_, gate = round_of(policy, responses, random_scores(responses), clip_norm=1.0)
    with pytest.raises(DprlhfError) as caught:
        ppo(round_, spec_of())
    assert f"{trained}' ({layer})" in str(caught.value)
    assert "policy.adapter.type: lora or ffa-lora" in str(caught.value)
    assert not gate.sums
