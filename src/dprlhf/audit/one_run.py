"""A one-run audit (Steinke et al. 2023, arXiv 2305.08846): many canary users in a single run.

Each canary is included with probability ½, by the audit's own randomness. An excluded canary is an
absent user: its rewards are NaN, so it contributes zero. Under replace-one another user takes its
place, whose reward asks for the opposite. The run uses the recipe's update, partition and noise on
the canaries alone; it reads no private data and keeps its ledger in its own folder. The attack then
sees the released policies and guesses who was included.

- ``gradient``: on :class:`~dprlhf.audit.bandit.BanditPolicy` each canary moves one known coordinate
  of the policy by S. This takes seconds, and is the strongest adversary.
- ``prompt``: on the recipe's own model, each canary is a unique prompt whose reward depends on a
  hash of the prompt and the response's first letter. The attack computes how likely the rewarded
  letters are under the released policy. This takes as long as training on that many users with
  responses of one token.

The optimizer is plain SGD, so that the released policies reveal every released sum. The policies of
any other optimizer are computed from those sums.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe as settings
from dprlhf.audit.bandit import ANSWERS, BanditPolicy
from dprlhf.audit.bounds import epsilon_lower_bound
from dprlhf.audit.likelihood import log_likelihood_ratio, noise_of
from dprlhf.data.in_memory import Sources
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.plan import Plan, json_ready
from dprlhf.privacy.relations import Space
from dprlhf.recipe import IN_MEMORY, Recipe, load_any_recipe
from dprlhf.runs.card import note_audit
from dprlhf.runs.folder import RunFolder, time_stamp, write_json
from dprlhf.training.build import open_run
from dprlhf.training.trainer import run_rounds

Array = NDArray[np.float64]
Bits = NDArray[np.bool_]

_CLIP_NORM = 1e-3  # far below the bandit's gradient norms: each canary contributes norm S
_SHARES = (0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        bound: Lower bound on ε.
        epsilon: Claimed ε of this run alone, without earlier runs; infinite without noise.
        delta: The δ at which both ε are stated.
        canaries: Number m of canaries.
        guesses: Number r of guesses.
        right: Number v of right guesses.
        space: Attack, ``gradient`` or ``prompt``; see :mod:`dprlhf.audit.one_run`.
        partition: The recipe's partition.
        update: The recipe's update.
        confidence: Probability with which the lower bound holds.
    """

    bound: float
    epsilon: float
    delta: float
    canaries: int
    guesses: int
    right: int
    space: str
    partition: str
    update: str
    confidence: float

    @property
    def holds(self) -> bool:
        """Whether the lower bound is consistent with the claimed ε."""
        return self.bound <= self.epsilon

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-ready."""
        shown: dict[str, Any] = json_ready({**asdict(self), "holds": self.holds})
        return shown


def audit(
    recipe: Recipe,
    folder: str | Path,
    *,
    canaries: int = 1000,
    space: Space | str = "gradient",
    confidence: float = 0.95,
    seed: int | None = None,
    quiet: bool = False,
) -> Audit:
    """Audit the ε of a recipe in one run on canaries; see :mod:`dprlhf.audit.one_run`.

    Args:
        recipe: Recipe whose update, rounds, partition and noise are audited; its data are not
            read.
        folder: Folder to write, which must not exist. Do not publish or resume it.
        canaries: Number m of canaries; more of them give a higher bound.
        space: Attack, ``gradient`` or ``prompt``.
        confidence: Probability with which the lower bound holds.
        seed: Seed of who is included; None draws from the operating system.
        quiet: Show no progress bars.

    Raises:
        DprlhfError: fewer canaries than rounds, or a setting is out of range.
    """
    if canaries < recipe.rounds:
        raise DprlhfError(
            f"{canaries} canaries cannot fill {recipe.rounds} rounds: give --canaries"
            f" {recipe.rounds} or more"
        )
    if space not in get_args(Space):
        raise DprlhfError(f"--space must be gradient or prompt, not {space!r}")
    random = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
    included: Bits = random.random(canaries) < 0.5
    signs = np.where(included, 1.0, np.nan)
    if recipe.privacy.adjacency == "replace-one":
        signs = np.where(included, 1.0, -1.0)
    run_folder = RunFolder(Path(folder))
    train = _bandit if space == "gradient" else _model
    plan, observed = train(recipe, run_folder, signs, quiet)
    scores = log_likelihood_ratio(_in_units_of_noise(observed, plan), plan, _known(plan, observed))
    best = _best_guesses(plan, canaries, recipe.privacy.delta, confidence)
    r, v = _guess(scores, included, best)
    found = Audit(
        bound=epsilon_lower_bound(canaries, r, v, recipe.privacy.delta, confidence),
        epsilon=plan.guarantee.epsilon,
        delta=recipe.privacy.delta,
        canaries=canaries,
        guesses=r,
        right=v,
        space=space,
        partition=plan.partition,
        update=recipe.update.name,
        confidence=confidence,
    )
    write_json(
        run_folder.path / "audit.json",
        {"audit": "canaries only, no private data", **found.as_dict()},
    )
    return found


def audit_run(run: str | Path, folder: str | Path, **options: Any) -> Audit:
    """Audit the ε of a finished run, as :func:`audit` does, and add the result to its card.

    The canaries take part in a new run of the same recipe; the policy does not change.

    Args:
        run: Folder of the finished run.
        folder: Folder to write, as for :func:`audit`.
        options: Other keyword arguments of :func:`audit`.

    Raises:
        DprlhfError: the run is not finished, or its update is not private.
    """
    audited = RunFolder(Path(run))
    audited.require()
    recipe = load_any_recipe(audited.recipe)
    if not isinstance(recipe, Recipe):
        raise DprlhfError(f"{run}: a run of stage {recipe.stage}; only private updates are audited")
    if not audited.privacy.is_file() or not audited.policy.is_dir():
        raise DprlhfError(f"{run}: not finished; finish it first with: dprlhf resume {run}")
    if recipe.privacy.adjacency == "add-remove":  # an earlier version's; the same ε as zero-out
        privacy = recipe.privacy.model_copy(update={"adjacency": "zero-out"})
        recipe = recipe.model_copy(update={"privacy": privacy})
    found = audit(recipe, folder, **options)
    note_audit(audited, found.as_dict())
    return found


def audit_folder() -> Path:
    """Return the path of a new audit folder."""
    return Path(f"runs/audit-{time_stamp()}")


# --- the run ------------------------------------------------------------------------------------


def _bandit(recipe: Recipe, folder: RunFolder, signs: Array, quiet: bool) -> tuple[Plan, Array]:
    """Return the plan and each round's change of each canary's θ, ``[canaries, rounds]``."""
    sign_of = {str(i): sign for i, sign in enumerate(signs)}

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [
            sign_of.get(p, 1.0)
            * (recipe.reward_range if text == ANSWERS[0] else -recipe.reward_range)
            for p, text in zip(prompts, completions, strict=True)
        ]

    changes: dict[str, Any] = {
        "evaluation": None,
        "previous": [],
        "policy": settings.Policy(model_name_or_path="bandit"),
        "update": _saturated(recipe),
        "rollout": recipe.rollout.model_copy(
            update={"responses": 8, "max_new_tokens": 1, "temperature": 1.0, "batch_size": 128}
            | {"backend": "transformers"}
        ),
    }
    policy = BanditPolicy(len(signs))
    thetas = [torch.zeros(policy.dimension)]

    def after_round(_: Any) -> None:
        thetas.append(policy.state()["table.weight"].flatten())

    plan = _train(recipe, changes, folder, list(sign_of), reward, policy, after_round, quiet)
    return plan, np.diff(torch.stack(thetas).double().numpy(), axis=0).T


def _saturated(recipe: Recipe) -> settings.PrivateUpdate:
    """Return the update with a clip norm and a target bound that every canary reaches.

    A critic keeps its share of the release but not its features, since the bandit has none.
    """
    bound = 0.1 * recipe.reward_range
    return recipe.update.saturated(clip_norm=_CLIP_NORM, batch_size=128, target_bound=bound)


def _model(recipe: Recipe, folder: RunFolder, signs: Array, quiet: bool) -> tuple[Plan, Array]:
    """Return the plan and the change of each canary's expected reward, ``[canaries, 1]``."""
    prompts = [f"{i} {hashlib.sha256(b'%d' % i).hexdigest()[:12]}" for i in range(len(signs))]
    sign_of = dict(zip(prompts, signs.tolist(), strict=True))

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [
            sign_of.get(p, 1.0) * recipe.reward_range * _likes(p, text[:1])
            for p, text in zip(prompts, completions, strict=True)
        ]

    evaluation = recipe.evaluation and recipe.evaluation.model_copy(update={"every": None})
    changes: dict[str, Any] = {
        "evaluation": evaluation,
        "rollout": recipe.rollout.model_copy(update={"max_new_tokens": 1}),
    }
    kept: list[CausalLMPolicy] = []
    plan = _train(recipe, changes, folder, prompts, reward, None, lambda _: None, quiet, kept)
    policy = kept[0]
    with policy.base():
        before = _expected(policy, prompts)
    return plan, (_expected(policy, prompts) - before)[:, None]


def _train(
    recipe: Recipe,
    changes: dict[str, Any],
    folder: RunFolder,
    prompts: list[str],
    reward: Any,
    policy: CausalLMPolicy | None,
    after_round: Callable[[Any], None],
    quiet: bool,
    kept: list[CausalLMPolicy] | None = None,
) -> Plan:
    column = recipe.data.user_column  # kept, so that the privacy unit is that of the earlier runs
    rows = [{"prompt": p} | ({} if column is None else {column: p}) for p in prompts]
    common = {
        "data": settings.Data(path=IN_MEMORY, user_column=column),
        "rewards": [settings.Reward(function=IN_MEMORY)],
        "optimizer": settings.Optimizer(name="sgd", learning_rate=1.0),
        "tracking": settings.Tracking(),  # do not log the audit among the user's experiments
        "output_dir": str(folder.path),
    }
    audited = recipe.model_copy(update=common | changes)
    sources = Sources(rows, reward, None, policy)
    with open_run(
        audited,
        folder,
        sources,
        create=True,
        callbacks=[after_round],
        quiet=quiet,
        counted=False,  # its users are canaries
    ) as run:
        run_rounds(run)
        run.progress.close()
        if kept is not None:
            kept.append(run.policy)
    return run.plan


def _likes(prompt: str, first: str) -> bool:
    """Return whether this first letter is rewarded for this canary: a hash picks half of them."""
    return bool(hashlib.sha256(f"{prompt}\n{first}".encode()).digest()[0] & 1)


@torch.no_grad()
def _expected(policy: CausalLMPolicy, prompts: list[str]) -> Array:
    """Return the probability of a rewarded first letter after each prompt, ``[prompts]``."""
    size = policy.model.get_output_embeddings().weight.shape[0]
    letters = [policy.tokenizer.decode([token])[:1] for token in range(size)]
    distinct, of_token = np.unique(letters, return_inverse=True)
    found = []
    for prompt, ids in zip(prompts, policy.encode(prompts, 64), strict=True):
        logits = policy.model(input_ids=torch.tensor([ids], device=policy.device)).logits[0, -1]
        mass = (logits.double() / policy.temperature).softmax(0).cpu().numpy()[:size]
        of_letter = np.bincount(of_token, mass)
        found.append(sum(p for p, x in zip(of_letter, distinct, strict=True) if _likes(prompt, x)))
    return np.array(found)


# --- the attack ---------------------------------------------------------------------------------


def _in_units_of_noise(observed: Array, plan: Plan) -> Array:
    """Scale each round's moves so that their noise has the standard deviation z/√J.

    An update may move the policy by any multiple of the released sum. The scale is therefore
    estimated from the moves, most of which are noise alone, by their median absolute value.
    """
    spread = 1.4826 * np.median(np.abs(observed), axis=0)
    scaled: Array = observed * (noise_of(plan) / np.maximum(spread, 1e-300))
    return scaled


def _known(plan: Plan, observed: Array) -> NDArray[np.int64] | None:
    """Return the canaries' rounds, from 0, if they are public (``stream``); otherwise None."""
    users = np.arange(len(observed))
    if observed.shape[1] == 1:
        return np.zeros_like(users)  # one column: the moves of all rounds together
    if not plan.mechanism.spec.in_order:
        return None
    rounds = users // int(plan.expected_batch_size)
    return np.where(rounds < plan.rounds, rounds, -1)


def _guess(scores: Array, included: Bits, best: tuple[int, int]) -> tuple[int, int]:
    """Guess the highest scores in and the lowest out; return the guesses and right guesses made."""
    order = np.argsort(scores, kind="stable")
    lowest, highest = best
    out, in_ = order[:lowest], order[len(order) - highest :]
    return lowest + highest, int((~included[out]).sum() + included[in_].sum())


def _options(canaries: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of canaries to guess out and in; fewer in all could not expose a broken run."""
    for share in _SHARES:
        guesses = max(2, int(share * canaries))
        yield guesses // 2, guesses - guesses // 2
        if share <= 0.5:
            yield 0, guesses


def _best_guesses(plan: Plan, canaries: int, delta: float, confidence: float) -> tuple[int, int]:
    """Choose the numbers of guesses by simulation, independently of who is really included."""
    random = np.random.default_rng(0)
    simulations = 3
    right = dict.fromkeys(_options(canaries), 0)
    for _ in range(simulations):
        included = random.random(canaries) < 0.5
        rounds = np.arange(canaries) * plan.rounds // canaries
        joins = np.arange(plan.rounds) == rounds[:, None]
        if plan.mechanism.spec.independent_rounds:
            joins = random.random(joins.shape) < plan.participations / plan.rounds
        absent = -1.0 if plan.adjacency == "replace-one" else 0.0
        moves = joins * np.where(included, 1.0, absent)[:, None]
        observed = moves + noise_of(plan) * random.standard_normal(joins.shape)
        known = rounds if plan.mechanism.spec.in_order else None
        scores = log_likelihood_ratio(observed, plan, known)
        for option in right:
            right[option] += _guess(scores, included, option)[1]

    def expected(option: tuple[int, int]) -> tuple[float, float]:
        r, v = sum(option), right[option] // simulations
        # The second entry decides where no bound is above 0: the significance of the right guesses.
        bound = epsilon_lower_bound(canaries, r, v, delta, confidence)
        return bound, (v - r / 2) / math.sqrt(r)

    return max(right, key=expected)
