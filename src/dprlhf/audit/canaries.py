"""Runs whose users are all canaries, through the code of an ordinary run.

A canary that is out is an absent user: its rewards are NaN, or its row moves no parameter, so it
contributes zero. Under replace-one another user takes its place, who asks for the opposite.

Besides the canaries there are probes: users of the same kind that are always in. The attack learns
from them how far a user moves a release and how large the noise is, from no canary that it will
guess.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe as settings
from dprlhf.audit.bandit import ANSWERS, NOWHERE, BanditPolicy, BanditRewardModel
from dprlhf.audit.watched_gate import MOST_VALUES, PromptReadings, Seen, WatchedGate, values_tested
from dprlhf.boundary import Private, open_private
from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import clip_users, clipped_vectors
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.partition import Allocation, allocate
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import IN_MEMORY, AnyRecipe, FeedbackRecipe, Recipe, RewardRecipe
from dprlhf.rewards import Scores
from dprlhf.runs.card import released_dimension
from dprlhf.runs.folder import RunFolder
from dprlhf.training.build import open_run
from dprlhf.training.reinforcement import Reinforcement
from dprlhf.training.run import Run
from dprlhf.training.trainer import run_rounds
from dprlhf.updates import UPDATES, PrivateRound
from dprlhf.updates.public_gradients import public_gradients
from dprlhf.updates.telemetry import TelemetryCoordinates

Array = NDArray[np.float64]
Started = Callable[[Plan, int, float], None]
"""Called before the first round, with the plan and the number of values that will be tested."""

CLIP_NORM = 1e-3  # far below the bandit's gradient norms: each canary contributes norm S
_FAR = 100.0
_AT_ONCE = 128
_ONE_TOKEN = {"max_new_tokens": 1, "mask_truncated": False, "agent": None}
"""What a canary's response is: one token, which is cut off there and is no conversation."""


@dataclass(frozen=True, repr=False)
class AuditRecord:
    """What an audited run released.

    Attributes:
        plan: The run's plan.
        rounds: The releases of each round 1..T.
        known: The round of each user, from 0, ``[users]``, −1 without one; None where ε only holds
            against those who do not know the rounds.
        moved: How far each round moved the policy, ``[rounds, dimension]``; None where that is not
            plainly the sum of the round's releases.
        gains: How far the run moved each user's expected reward, ``[users]``, where the canaries
            are prompts of the recipe's own model; None in gradient space.
        prompts: What the releases show of each such canary; None where they were not read.
    """

    plan: Plan
    rounds: list[list[Seen]]
    known: NDArray[np.int64] | None
    moved: Array | None = None
    gains: Array | None = None
    prompts: PromptReadings | None = None


def gradient_run(
    recipe: AnyRecipe, folder: RunFolder, signs: Array, quiet: bool, started: Started
) -> AuditRecord:
    """Run a recipe's stage on the small model that fits it, with one direction for each user.

    Args:
        recipe: Recipe of private updates or of a supervised stage; its data are not read.
        folder: Folder of the run.
        signs: 1 for a user that is in, NaN for one that is absent, −1 for its opposite.
        quiet: Show no progress bars.
        started: Called before the first round.
    """
    changes, rows, reward, policy = _STAGES[recipe.stage](recipe, signs)
    thetas = [torch.zeros(policy.dimension)]

    def after_round(_: Any) -> None:
        thetas.append(policy.state()["table.weight"].flatten())

    def begin(run: Run) -> None:
        started(run.plan, _values_tested(run), _move(run))

    run, gate = _train(
        recipe,
        changes,
        folder,
        InMemoryInputs(rows, reward, None, policy),
        after_round,
        quiet,
        begin,
    )
    moved = np.diff(torch.stack(thetas).double().numpy(), axis=0)
    plain = recipe.stage != "rl" or _plain(recipe)
    return AuditRecord(run.plan, list(gate.rounds.values()), _known(run), moved if plain else None)


def prompt_run(
    recipe: AnyRecipe, folder: RunFolder, signs: Array, quiet: bool, started: Started
) -> AuditRecord:
    """Run private updates of the recipe's own model on unique prompts with planted rewards.

    Arguments are those of :func:`gradient_run`.
    """
    recipe = cast(Recipe, recipe)
    prompts = [_random_text(i) for i in range(len(signs))]
    sign_of = dict(zip(prompts, signs.tolist(), strict=True))

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [
            sign_of.get(p, 1.0) * recipe.reward_range * _likes(p, text[:1])
            for p, text in zip(prompts, completions, strict=True)
        ]

    evaluation = recipe.evaluation and recipe.evaluation.model_copy(update={"every": None})
    changes: dict[str, Any] = {
        "evaluation": evaluation,
        "rollout": recipe.rollout.model_copy(update=_ONE_TOKEN),
        "data": _data(recipe.data),
    }
    if _plain(recipe):  # each canary moves a release by S, and all together move the policy as far
        changes["update"] = recipe.update.model_copy(update={"clip_norm": CLIP_NORM})
        step = recipe.update.clip_norm / CLIP_NORM
        changes["optimizer"] = settings.Optimizer(name="sgd", learning_rate=step)

    def begin(run: Run) -> None:
        started(run.plan, _values_tested(run), _move(run))
        if _readable(run):
            reader = PromptReadings(signs, run.plan, np.random.default_rng())
            cast(WatchedGate, run.gate).prompts = reader
            cast(Reinforcement, run.stage).watch = partial(_expect, reader, run)

    sources = InMemoryInputs(_rows(recipe.data, prompts), reward, None, None)
    run, gate = _train(recipe, changes, folder, sources, lambda _: None, quiet, begin)
    with run.policy.base():
        before = _expected(run.policy, prompts)
    gains = _expected(run.policy, prompts) - before
    rounds = list(gate.rounds.values())
    return AuditRecord(run.plan, rounds, _known(run), gains=gains, prompts=gate.prompts)


def _readable(run: Run) -> bool:
    """Return whether each canary can be read from a release of its own."""
    members = max(len(open_private(run.allocation).round(t + 1)) for t in range(run.plan.rounds))
    once = run.plan.bands == run.plan.participations == 1 and run.plan.partition != "poisson"
    return once and _plain(run.recipe) and members * run.policy.dimension <= MOST_VALUES


def _expect(reader: PromptReadings, run: Run, round_: PrivateRound) -> None:
    """State what the canaries of a round contribute if they take part, and if they do not."""
    recipe, policy = cast(Recipe, run.recipe), round_.policy
    responses = open_private(round_.responses)
    texts, prompts = responses.texts, [responses.prompts.prompts[p] for p in responses.prompt]
    likes = np.array([_likes(p, text[:1]) for p, text in zip(prompts, texts, strict=True)])

    def contributions(sign: float) -> Array:
        rewards = sign * recipe.reward_range * likes
        vectors = public_gradients(
            policy,
            responses,
            Scores(rewards, np.ones(len(rewards), dtype=np.bool_), {}),
            update=recipe.update,
            kl=recipe.kl,
            reward_range=recipe.reward_range,
            optimizer=run.optimizer,
            t=round_.t,
        )
        if round_.subspace is not None:
            vectors = round_.subspace.coordinates(vectors.to(policy.device))
        bound, most = round_.vector_clip_norm, run.plan.users
        return clip_users(vectors.cpu(), bound, most_users=most)[0].numpy() / run.plan.clip_norm

    if_in = contributions(1.0)
    opposed = run.plan.adjacency == "replace-one"
    if_out = contributions(-1.0) if opposed else np.zeros_like(if_in)
    reader.expect(open_private(run.allocation).round(round_.t), if_in, if_out)


def vector_run(plan: Plan, folder: Path, key: bytes, signs: Array) -> AuditRecord:
    """Run partition, clipping, ledger and gate on given vectors, without a model: milliseconds.

    Args:
        plan: Plan of as many users as there are signs.
        folder: Folder for the ledger.
        key: The run's key.
        signs: As in :func:`gradient_run`.
    """
    ledger = Ledger(folder / "ledger.jsonl", plan.terms())
    users = len(signs)
    gate = WatchedGate(Gate(plan, ledger, key), plan, users)
    allocation = open_private(allocate(plan, key))
    far = torch.from_numpy(signs) * _FAR * plan.clip_norm
    for t in range(1, plan.rounds + 1):
        members = allocation.round(t)
        for _ in range(plan.releases_per_round):
            clipped = clipped_vectors(
                Private(_directions(members, far)),
                users,
                extra=Private(np.zeros((len(members), 0))),
                extra_norm=0.0,
                clip_norm=plan.clip_norm,
                reduce=lambda total: total,
            )
            gate.release(t, clipped.bounded)
    ledger.close()
    return AuditRecord(plan, list(gate.rounds.values()), _told(plan, allocation))


def _directions(members: NDArray[np.int64], far: torch.Tensor) -> Any:
    for start in range(0, len(members), _AT_ONCE):
        chosen = members[start : start + _AT_ONCE]
        vectors = torch.zeros(len(chosen), len(far), dtype=torch.float64)
        vectors[np.arange(len(chosen)), chosen] = far[chosen]
        yield np.arange(start, start + len(chosen)), vectors


# --- the stages in gradient space ---------------------------------------------------------------


_Made = tuple[dict[str, Any], Any, Any, CausalLMPolicy]
"""The settings that a stage's recipe is changed by, its rows, its reward and its small model."""


def _updates(recipe: AnyRecipe, signs: Array) -> _Made:
    recipe = cast(Recipe, recipe)
    sign_of = {str(i): sign for i, sign in enumerate(signs)}

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [
            sign_of.get(p, 1.0)
            * (recipe.reward_range if text == ANSWERS[0] else -recipe.reward_range)
            for p, text in zip(prompts, completions, strict=True)
        ]

    changes = {
        "rewards": [settings.Reward(function=IN_MEMORY)],
        "policy": settings.Policy(model_name_or_path="bandit"),
        "update": recipe.update.saturated(
            clip_norm=CLIP_NORM, batch_size=_AT_ONCE, target_bound=0.1 * recipe.reward_range
        ),
        # All else as by default: the bandit has two answers, and none of them may be ruled out.
        "rollout": settings.Rollout(
            base_policy=recipe.rollout.base_policy,
            responses=8,
            max_new_tokens=1,
            batch_size=_AT_ONCE,
        ),
        "data": _data(recipe.data),
    }
    return changes, _rows(recipe.data, list(sign_of)), reward, BanditPolicy(len(signs))


def _fine_tuning(recipe: AnyRecipe, signs: Array) -> _Made:
    texts = _texts(signs)
    learnt = [ANSWERS[1] if sign < 0 else ANSWERS[0] for sign in signs]
    changes = {
        "policy": settings.Policy(model_name_or_path="bandit"),
        "update": _saturated(recipe),
        "data": settings.Documents(
            path=IN_MEMORY, user_column=recipe.data.user_column, max_completion_tokens=1
        ),
    }
    rows = _rows(recipe.data, texts, completion=learnt)
    return changes, rows, None, BanditPolicy(len(signs))


def _reward_model(recipe: AnyRecipe, signs: Array) -> _Made:
    labels = cast(RewardRecipe, recipe).labels
    texts = _texts(signs)
    other = [f"{NOWHERE}{i}" for i in range(len(signs))]
    column = None if labels is None else "label"
    if labels is None:
        rows = _rows(
            recipe.data,
            [f"{text} " for text in other],
            chosen=[b if sign < 0 else a for a, b, sign in zip(texts, other, signs, strict=True)],
            rejected=[a if sign < 0 else b for a, b, sign in zip(texts, other, signs, strict=True)],
        )
    else:
        rows = _rows(recipe.data, texts, label=[int(sign < 0) for sign in signs])
    changes = {
        "policy": settings.Policy(model_name_or_path="bandit", dtype="float32"),
        "update": _saturated(recipe),
        "data": settings.Preferences(
            path=IN_MEMORY, user_column=recipe.data.user_column, label_column=column
        ),
    }
    count = None if labels is None else len(labels)
    return changes, rows, None, BanditRewardModel(len(signs), count)


def _preferences(recipe: AnyRecipe, signs: Array) -> _Made:
    answers = [ANSWERS[::-1] if sign < 0 else ANSWERS for sign in signs]
    changes = {
        "policy": settings.Policy(model_name_or_path="bandit"),
        # With β = 1 each canary's gradient is far above the clip norm.
        "update": _saturated(recipe).model_copy(update={"beta": 1.0}),
        "data": settings.PreferencePairs(
            path=IN_MEMORY, user_column=recipe.data.user_column, max_completion_tokens=1
        ),
    }
    chosen, rejected = ([pair[i] for pair in answers] for i in range(2))
    rows = _rows(recipe.data, _texts(signs), chosen=chosen, rejected=rejected)
    return changes, rows, None, BanditPolicy(len(signs))


def _feedback(recipe: AnyRecipe, signs: Array) -> _Made:
    plain: dict[str, Any] = {"baseline": 0.0, "reward_range": 1.0, "value_rounds": 0}
    if cast(FeedbackRecipe, recipe).update.loss_type == "linear_reward":
        plain["loss_type"] = "policy_gradient"  # one release is one, whatever follows from it
    changes = {
        "policy": settings.Policy(model_name_or_path="bandit"),
        # With β = 1 each canary's gradient is far above the clip norm.
        "update": _saturated(recipe).model_copy(update={"beta": 1.0, **plain}),
        "data": settings.LoggedFeedback(
            path=IN_MEMORY, user_column=recipe.data.user_column, max_completion_tokens=1
        ),
    }
    labels = [not sign < 0 for sign in signs]
    shown = [ANSWERS[0]] * len(signs)
    rows = _rows(recipe.data, _texts(signs), completion=shown, label=labels)
    return changes, rows, None, BanditPolicy(len(signs))


_STAGES: dict[str, Callable[[AnyRecipe, Array], _Made]] = {
    "rl": _updates,
    "sft": _fine_tuning,
    "reward": _reward_model,
    "dpo": _preferences,
    "feedback": _feedback,
}


def _saturated(recipe: AnyRecipe) -> Any:
    # Canaries have no public rows beside them.
    bounds = {"clip_norm": CLIP_NORM, "batch_size": _AT_ONCE, "subspace": None}
    return recipe.update.model_copy(update=bounds)


def _texts(signs: Array) -> list[str]:
    return [f"{NOWHERE if np.isnan(sign) else ''}{i}" for i, sign in enumerate(signs)]


def _plain(recipe: AnyRecipe) -> bool:
    """Return whether an update moves the policy by the sum of its releases, as far as is known."""
    update = cast(Recipe, recipe).update
    return update.name in UPDATES and update.least_squares is None


def _data(data: settings.Data) -> settings.Data:
    # The column is kept, so that the privacy unit is that of the earlier runs.
    return settings.Data(path=IN_MEMORY, user_column=data.user_column)


def _rows(data: settings.Data, prompts: list[str], **columns: list[Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i, prompt in enumerate(prompts):
        row = {"prompt": prompt} | {name: values[i] for name, values in columns.items()}
        rows.append(row | {name: str(i) for name in data.owners if name not in row})
    return rows


# --- the run ------------------------------------------------------------------------------------


def _train(
    recipe: AnyRecipe,
    changes: Mapping[str, Any],
    folder: RunFolder,
    sources: InMemoryInputs,
    after_round: Callable[[Any], None],
    quiet: bool,
    begin: Callable[[Run], None],
) -> tuple[Run, WatchedGate]:
    common = {
        "optimizer": settings.Optimizer(name="sgd", learning_rate=1.0),
        "tracking": settings.Tracking(),  # do not log the audit among the user's experiments
        "output_dir": str(folder.path),
    }
    alone: dict[str, Any] = (
        {"evaluation": None, "previous": []} if sources.policy is not None else {}
    )
    reward = {"rewards": [settings.Reward(function=IN_MEMORY)]} if recipe.stage == "rl" else {}
    audited = recipe.model_copy(update={**common, **alone, **reward, **changes})
    with open_run(
        audited,
        folder,
        sources,
        create=True,
        callbacks=[after_round],
        quiet=quiet,
        counted=False,  # its users are canaries
    ) as run:
        # Canaries on the recipe's own model have no coordinates of their own.
        own = run.policy.dimension if sources.policy is not None else 0
        allocation = open_private(run.allocation)
        users = [len(allocation.round(t)) for t in range(1, run.plan.rounds + 1)]
        gate = WatchedGate(cast(Gate, run.gate), run.plan, own, _telemetry(run), users)
        run.gate = cast(Gate, gate)
        if isinstance(run.stage, Reinforcement):
            run.stage.warned = True  # whoever is absent has no valid reward, on purpose
        begin(run)
        run_rounds(run)
        run.progress.close()
    if not gate.moved:
        raise DprlhfError(
            f"{folder.path}: the canaries moved nothing that was released, so whoever took part"
            " could not have been recognised however small the noise: this is no audit. Give more"
            " canaries, or look for a setting of the recipe that leaves all of them out"
        )
    return run, gate


def _telemetry(run: Run) -> TelemetryCoordinates | None:
    """Return what is beside the users' vectors in the first release of a round."""
    telemetry: TelemetryCoordinates | None = getattr(run.stage, "telemetry", None)
    return telemetry if telemetry is not None and telemetry.count else None


def _move(run: Run) -> float:
    """Return how far a user moves the rest of a round's first release, in units of S, at most."""
    telemetry = _telemetry(run)
    return math.sqrt(1 - (telemetry.norm / run.plan.clip_norm) ** 2) if telemetry else 1.0


def _values_tested(run: Run) -> int:
    """Return how many of the values that a run will release have their noise tested."""
    recipe, length = run.recipe, released_dimension(run.recipe, run.policy.dimension)
    oracle = recipe.update.least_squares if isinstance(recipe, Recipe) else None
    if oracle is not None and oracle.name == "sufficient-statistics":
        length = length * (length + 3) // 2  # the upper triangle of a matrix, and a vector
    later = run.plan.releases_per_round - 1
    telemetry = _telemetry(run)
    riding = telemetry.count if telemetry else 0
    of_round = values_tested(length + riding) + later * values_tested(length)
    return run.plan.rounds * of_round


def _known(run: Run) -> NDArray[np.int64] | None:
    return _told(run.plan, open_private(run.allocation))


def _told(plan: Plan, allocation: Allocation) -> NDArray[np.int64] | None:
    """Return the users' rounds, from 0, where ε holds against those who know them."""
    if not plan.mechanism.spec.disjoint:
        return None
    rounds = np.full(plan.users, -1)
    for t in range(plan.rounds):
        rounds[allocation.round(t + 1)] = t
    return rounds


def _random_text(i: int) -> str:
    """Return a text that nobody else has, of letters and spaces."""
    digits = hashlib.shake_128(b"%d" % i).digest(24)
    return "".join("abcdefghijklmnopqrstuvwxyz     "[digit % 31] for digit in digits)


def _likes(prompt: str, first: str) -> bool:
    """Return whether this first letter is rewarded for this canary: a hash picks half of them."""
    return bool(hashlib.sha256(f"{prompt}\n{first}".encode()).digest()[0] & 1)


@torch.no_grad()
def _expected(policy: CausalLMPolicy, prompts: list[str]) -> Array:
    """Return the probability of a rewarded first letter after each prompt, ``[prompts]``."""
    size = policy.model.get_output_embeddings().weight.shape[0]
    letters = [policy.tokenizer.decode([token])[:1] for token in range(size)]
    distinct, of_token = np.unique(letters, return_inverse=True)
    means = []
    for prompt, ids in zip(prompts, policy.encode(prompts, 64), strict=True):
        logits = policy.model(input_ids=torch.tensor([ids], device=policy.device)).logits[0, -1]
        mass = (logits.double() / policy.temperature).softmax(0).cpu().numpy()[:size]
        of_letter = np.bincount(of_token, mass)
        means.append(sum(p for p, x in zip(of_letter, distinct, strict=True) if _likes(prompt, x)))
    return np.array(means)
