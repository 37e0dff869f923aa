"""The planner: rounds, passes, bands, partition and responses for a recipe's (ε, δ).

``dprlhf plan RECIPE`` shows the best few choices. They follow from public facts alone: the number
of users, the guarantee, and the signal, reward and time that are measured on public prompts. No
user's prompt is read for it; the users' rows are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.data.public import Guides
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.gradients.subspace import fit_subspace
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.optimizers import learning_rate, make_optimizer
from dprlhf.privacy.partitions import Partition
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import Optimizer, Recipe
from dprlhf.recipe.sections import BETAS
from dprlhf.rewards import Scorer, Scores
from dprlhf.rewards.scoring import score_responses
from dprlhf.rollout import Responses, sample_public
from dprlhf.runs.opening import check_public
from dprlhf.training.build import load_parts
from dprlhf.training.choices import (
    ROUNDS,
    Candidate,
    Choice,
    Signal,
    averaged_norms,
    best_choices,
    candidates,
    cosines,
    is_slow,
    planner,
)
from dprlhf.training.processes import Processes
from dprlhf.training.reinforcement import Reinforcement
from dprlhf.training.timing import seconds_a_response, seconds_a_round
from dprlhf.updates.public_gradients import likelihood_gradients, public_gradients


@dataclass(frozen=True)
class Probe:
    """What public prompts show at the start of training."""

    signals: dict[int, Signal]  # The signal for each number of responses to a prompt
    reward: float
    prompts: int


def measure_signal(
    policy: CausalLMPolicy,
    scorer: Scorer,
    prompts: Prompts,  # PUBLIC prompts
    recipe: Recipe,  # The settled settings, with a finite clip norm
    responses: list[int],
) -> Probe:
    """Measure the signal for several numbers of responses to a prompt; the policy does not move.

    The prompts are sampled from, scored and differentiated as users' prompts will be. With c_u the
    contribution of prompt u in units of the clip norm S, the products of different prompts'
    contributions average to the square of their mean's norm, without bias: s² = E⟨c_u, c_w⟩, u ≠ w.
    All are measured on the same draws, of which a smaller number takes the first of each prompt.
    With ``update.subspace``, half of the prompts give the directions and the others the signal.
    """
    rollout = recipe.rollout.model_copy(update={"responses": max(responses)})
    users = np.arange(len(prompts))
    slots = np.zeros_like(users)
    alone = prompts.changed(users=users, slots=slots)
    sampled = sample_public(policy, alone, recipe, rollout, "signal")
    scores = score_responses(scorer, sampled)
    signals = {}
    for count in responses:
        of_prompt = np.arange(len(sampled.user)) % max(responses)
        rows = np.flatnonzero(of_prompt < count)
        signals[count] = _signal(policy, recipe, sampled.take(rows), scores.take(rows))
    return Probe(signals, float(scores.values[scores.valid].mean()), len(prompts))


def _signal(policy: CausalLMPolicy, recipe: Recipe, responses: Responses, scores: Scores) -> Signal:
    optimizer = make_optimizer(recipe.optimizer, policy.parameters.values())
    vectors = public_gradients(
        policy,
        responses,
        scores,
        update=recipe.update,
        kl=recipe.kl,
        reward_range=recipe.reward_range,
        optimizer=optimizer,
        t=1,
    )
    subspace, clip = recipe.update.subspace, recipe.update.clip_norm
    if subspace is None:
        return signal_of(vectors, clip)
    half, avoid = len(vectors) // 2, None
    if subspace.keep_perplexity:
        size = recipe.update.batch_size
        gradients = likelihood_gradients(
            policy, responses, batch_size=size, optimizer=optimizer, t=1
        )
        avoid = gradients[:half]
    fitted = fit_subspace(
        vectors[:half],
        subspace.rank,
        clip_norm=clip,
        mean_first=subspace.mean_first,
        natural=subspace.target_kl is not None,
        avoid=avoid,
    )
    return signal_of(vectors[half:], clip, fitted.directions, fitted.scale)


def signal_of(
    vectors: torch.Tensor,  # A vector for each public user, [users, dimension]
    clip_norm: float,
    directions: torch.Tensor | None = None,  # Directions of a subspace, [p, dimension]
    scale: float = 1.0,
) -> Signal:
    """Return the signal of users' vectors before clipping."""
    finite = vectors.isfinite().all(1, keepdim=True)
    vectors = torch.where(finite, vectors, 0.0).double()
    seen = vectors if directions is None else scale * vectors @ directions.double().T
    norms = seen.norm(dim=1, keepdim=True)
    clipped = seen * (clip_norm / norms.clamp(min=1e-300)).clamp(max=1) / clip_norm
    square = max(mean_product(clipped, clipped), 0.0)
    whole = max(mean_product(vectors, vectors), 0.0)
    lifted = clipped if directions is None else clipped @ directions.double()
    both = (square * whole) ** 0.5
    alignment = mean_product(lifted, vectors) / both if both else 1.0
    # The standard error of mean_product(clipped, clipped) where its mean is zero.
    users, error = len(clipped), math.inf
    if users > 1:
        products = (clipped @ clipped.T).fill_diagonal_(0.0)
        error = float(products.norm()) * 2**0.5 / (users * (users - 1))
    return Signal(
        norm=square**0.5,
        spread=max(float(clipped.square().sum(1).mean()) - square, 0.0),
        dimension=seen.shape[1],
        alignment=min(max(alignment, 0.0), 1.0),
        gradient=whole**0.5,
        trained=vectors.shape[1],
        scale=scale,
        error=error,
    )


def mean_product(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the mean of ⟨a_u, b_w⟩ over all u ≠ w: an unbiased ⟨E a, E b⟩."""
    users = len(a)
    if users < 2:
        return 0.0
    total = float(a.sum(0) @ b.sum(0)) - float((a * b).sum())
    return total / (users * (users - 1))


Array = NDArray[np.float64]


@dataclass(frozen=True)
class Travel:
    """How far a run moves the policy, after each round."""

    cosines: Array  # Expected cosine between each step and the mean gradient, [rounds]
    along: Array  # D, the distance along the mean gradient, [rounds]
    across: Array  # W, the sum of squared distances across it, [rounds]


def travel(plan: Plan, signal: Signal, optimizer: Optimizer, clip_norm: float) -> Travel:
    """Return how far a run is expected to move the policy.

    A step of ``normalized-sgd`` is η long. One of ``sgd`` is η times the averaged release's norm,
    over 1 − μ. One of Adam is taken to be η√d times the averaged release's norm over that of a
    single one, with the number d of trained parameters: exact where each coordinate keeps its
    variance, as it does under noise, in a subspace for as long as its directions stay.
    """
    momentum = BETAS[0] if optimizer.name.startswith("adam") else optimizer.momentum
    cos, norms = cosines(plan, signal, momentum), averaged_norms(plan, signal, momentum)
    rates = np.array([learning_rate(optimizer, t + 1, plan.rounds) for t in range(plan.rounds)])
    if optimizer.name == "sgd":
        rates = (
            rates
            * clip_norm
            / signal.scale
            * norms
            * (1 - momentum ** np.arange(1, plan.rounds + 1))
        )
        rates = rates / (1 - momentum)
    elif optimizer.name != "normalized-sgd":
        moved = signal.trained or signal.dimension
        rates = rates * moved**0.5 * norms / averaged_norms(plan, signal)
    return Travel(cos, np.cumsum(rates * cos), np.cumsum(rates**2 * (1 - cos**2)))


@dataclass(frozen=True)
class RewardModel:
    """The constants of a prediction of the reward from a plan's figures, which ranks plans.

    Steps of length η_t, of which the share cos_t points along the mean gradient and the rest is
    sampling error and noise, move the policy by D = Σ η_t cos_t along the gradient and by
    W = Σ η_t²(1 − cos_t²) across it. The predicted rise is A (1 − exp(−uD)) − ½ u² W, with
    A = R − (the mean reward at the start) and u = ‖∇J‖ / A from public prompts, so that the first
    steps gain η cos ‖∇J‖. The curvature across the gradient is taken to be that along it. How far
    the prediction was from finished runs is in ``docs/planning.md``.
    """

    most: float  # A, the most that the mean reward can rise
    rate: float  # u, per unit of distance along the gradient

    def rise(self, moved: Travel) -> Array:
        """Return the predicted rise of the mean reward after each round, ``[rounds]``."""
        gained = self.most * -np.expm1(-self.rate * moved.along)
        rise: Array = gained - 0.5 * self.rate**2 * moved.across
        return rise


def reward_model(signal: Signal, start: float, reward_range: float) -> RewardModel | None:
    """Return the constants of the prediction; None without a mean gradient, or with zero."""
    most = reward_range - start
    if not signal.gradient or most <= 0:
        return None
    return RewardModel(most, signal.gradient / most)


PROBED = 512
"""Number of public prompts that the signal is measured on, at most."""

_FEWEST_PROBED = 32

PARTITIONS: tuple[Partition, ...] = ("random-allocation", "fixed")


@dataclass(frozen=True)
class Facts:
    """The public facts that a choice follows from."""

    recipe: Recipe
    users: int  # Number N of users
    dimension: int  # Number d of trained parameters
    probe: Probe
    seconds: dict[str, float]  # Seconds a response takes in all, rollout, reward and update
    evaluation: int  # Number of public prompts that are evaluated before and after the run
    guides: Guides | None
    model: RewardModel | None  # The constants of the predicted reward

    def seconds_of(self, candidate: Candidate, plan: Plan) -> float:
        """Return the estimated duration of a run on one process, evaluation before and after it."""
        rollout = self.recipe.rollout.model_copy(update={"responses": candidate.responses})
        recipe = self.recipe.model_copy(update={"rollout": rollout})
        of_rounds = plan.rounds * seconds_a_round(recipe, plan, self.seconds, self.guides)
        return of_rounds + 2 * self.evaluation * (self.seconds["rollout"] + self.seconds["reward"])

    def as_dict(self) -> dict[str, Any]:
        """Return the facts, JSON-ready."""
        privacy = self.recipe.privacy
        return {
            "users": self.users,
            "epsilon": privacy.epsilon,
            "delta": privacy.delta,
            "dimension": self.dimension,
            "signals": {r: asdict(signal) for r, signal in self.probe.signals.items()},
            "reward": self.probe.reward,
            "public_prompts": self.probe.prompts,
            "seconds_a_response": self.seconds,
            "model": asdict(self.model) if self.model is not None else None,
        }

    def describe(self) -> str:
        """Return the facts as lines of text."""
        privacy, probe = self.recipe.privacy, self.probe
        lines = [
            f"{self.users} users, epsilon {privacy.epsilon:g}, delta {privacy.delta:g},"
            f" {self.dimension:,} trained parameters",
            f"on {probe.prompts} public prompts: mean reward {probe.reward:.3g},"
            f" {1000 * sum(self.seconds.values()):.3g} ms a response",
        ]
        lines += [
            f"  {r} responses: s = {signal.norm:.4f}, p = {signal.dimension:,},"
            f" alignment {signal.alignment:.2f}"
            for r, signal in probe.signals.items()
        ]
        return "\n".join(lines)

    def rated(self, candidate: Candidate, plan: Plan) -> Choice:
        """Return a candidate with its figures."""
        signal = self.probe.signals[candidate.responses]
        rate = learning_rate_at(self.recipe, candidate.rounds)
        optimizer = self.recipe.optimizer.model_copy(update={"learning_rate": rate})
        moved = travel(plan, signal, optimizer, self.recipe.update.clip_norm)
        rise = float(self.model.rise(moved)[-1]) if self.model is not None else None
        seconds = self.seconds_of(candidate, plan)
        return Choice(candidate, plan, signal, moved.cosines, rate, seconds, rise)


def learning_rate_at(recipe: Recipe, rounds: int) -> float:
    """Return the learning rate for another number of rounds than the recipe's.

    Learning rate times rounds stays as the recipe has it, and with it how far a run can move.
    """
    return recipe.optimizer.learning_rate * recipe.rounds / rounds


def measure(
    recipe: Recipe,
    sources: InMemoryInputs | None = None,
    *,
    responses: Sequence[int] = (),
    prompts: int = PROBED,
) -> Facts:
    """Load what a recipe names and measure signal, reward and time on its public prompts."""
    if recipe.privacy.epsilon is None or recipe.privacy.baseline:
        raise DprlhfError(
            "plan: the recipe must state privacy.epsilon, a finite one: the planner chooses what"
            " the noise multiplier follows from"
        )
    if recipe.update.least_squares is not None:
        raise DprlhfError(
            f"plan: no signal is measured of update.name {recipe.update.name} with an oracle, which"
            " releases the answers of a regression: compare settings by dprlhf tune"
        )
    one_round = {"participations": 1, "bands": 1, "partition": "random-allocation"}
    privacy = recipe.privacy.model_copy(update=one_round)
    probed = recipe.model_copy(update={"privacy": privacy, "rounds": 1})
    sources = sources or InMemoryInputs(None, None, None)
    processes = Processes.connect()
    stage, parts = load_parts(probed, sources, processes, quiet=True, counted=False)
    assert isinstance(stage, Reinforcement)
    # A run is only asked for the rows that it takes itself; noise does not cover what is chosen.
    processes.on_main(lambda: check_public(recipe, parts.users, parts.public, probed=prompts))
    if parts.public is None or recipe.evaluation is None:
        raise DprlhfError(
            "plan: the signal is measured on public prompts: name some under evaluation.data"
        )
    first = recipe.evaluation.prompts  # after the evaluation's rows, if enough rows are left there
    if parts.public.count - first < _FEWEST_PROBED:
        first = 0
    rows = parts.public.select(np.arange(first, min(first + prompts, parts.public.count)))
    settled = stage.recipe
    counts = sorted({*responses} or {recipe.rollout.responses})
    probe = measure_signal(parts.policy, stage.scorer, rows, settled, counts)
    if not any(signal.known for signal in probe.signals.values()):
        raise DprlhfError(
            f"plan: no signal could be measured on {probe.prompts} public prompts, whose gradients"
            " agree no more than by chance: give more of them, or compare settings by dprlhf tune"
        )
    for _ in range(2):  # the first pass warms up
        phases = seconds_a_response(parts.policy, stage.scorer, rows, settled, keep=stage.keep)
    signal = probe.signals[counts[-1]]
    return Facts(
        recipe=settled.model_copy(update={"privacy": recipe.privacy, "rounds": recipe.rounds}),
        users=parts.users.count,
        dimension=parts.policy.dimension,
        probe=probe,
        seconds=phases,
        evaluation=len(stage.public) if stage.public is not None else 0,
        guides=parts.guides,
        model=reward_model(signal, probe.reward, recipe.reward_range),
    )


def choose(
    facts: Facts,
    *,
    minutes: float | None = None,
    responses: float | None = None,
    rounds: Sequence[int] = (),
    show: int = 5,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[list[Choice], int]:
    """Return the best few choices, the best first, and how many were not costed for lack of time.

    The best choice has the largest predicted rise of the reward; without a prediction, the largest
    mean cosine. The partitions are random allocation and disjoint batches, or the recipe's own if
    that is another one.
    """
    recipe, privacy = facts.recipe, facts.recipe.privacy
    cost, guess = planner(
        facts.users,
        privacy.epsilon or math.inf,
        privacy.delta,
        adjacency=privacy.adjacency,
        releases=recipe.update.releases,
    )
    if minutes is None and responses is None:
        responses = facts.users * privacy.participations * max(facts.probe.signals)
    own = privacy.partition
    partitions = PARTITIONS if own in PARTITIONS else (own,)
    rounds = rounds or sorted({*ROUNDS, recipe.rounds})
    counts = sorted(facts.probe.signals)
    listed = [
        candidate
        for candidate in candidates(
            facts.users,
            most_responses=math.inf if responses is None else responses,
            rounds=rounds,
            partitions=partitions,
            responses=counts,
        )
        if allowed(candidate, facts.recipe)
    ]
    if minutes is not None:
        timed = ((c, facts.rated(c, guess(c)).seconds) for c in listed)
        listed = [c for c, s in timed if s is not None and s <= 60 * minutes]
    if not listed:
        limit = f"{minutes:g} minutes" if minutes is not None else f"{responses:g} responses"
        raise DprlhfError(
            f"plan: no choice fits into {limit}: one pass over {facts.users} users with"
            f" {counts[0]} responses each takes more"
        )

    def rank(choice: Choice) -> float:
        return choice.reward if choice.reward is not None else float(choice.cosines.mean())

    return best_choices(
        listed,
        cost=cost,
        guess=guess,
        rate=facts.rated,
        rank=rank,
        show=show,
        slow=is_slow,
        progress=progress,
    )


def allowed(candidate: Candidate, recipe: Recipe) -> bool:
    """Return whether a recipe with these settings is valid, whatever the accountant says."""
    try:
        with_choice(recipe, candidate)
    except ValidationError:
        return False
    return True


def with_choice(recipe: Recipe, candidate: Candidate) -> Recipe:
    """Return a recipe with a candidate's settings, checked."""
    values = recipe.model_dump()
    values["rounds"] = candidate.rounds
    values["optimizer"] |= {"learning_rate": learning_rate_at(recipe, candidate.rounds)}
    values["rollout"] |= {"responses": candidate.responses}
    values["privacy"] |= {
        "partition": candidate.partition,
        "participations": candidate.participations,
        "bands": candidate.bands,
    }
    return Recipe.model_validate(values)
