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
from pydantic import ValidationError

from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.data.public import Guides
from dprlhf.errors import DprlhfError
from dprlhf.privacy.partitions import Partition
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import Recipe
from dprlhf.runs.opening import check_public
from dprlhf.training.build import load_parts
from dprlhf.training.choices import (
    ROUNDS,
    Candidate,
    Choice,
    best_choices,
    candidates,
    is_slow,
    planner,
)
from dprlhf.training.prediction import RewardModel, reward_model, travel
from dprlhf.training.processes import Processes
from dprlhf.training.reinforcement import Reinforcement
from dprlhf.training.signal import Probe, measure_signal
from dprlhf.training.timing import seconds_a_response, seconds_a_round

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
        phases = seconds_a_response(parts.policy, stage.scorer, rows, settled, keeps=stage.keeps)
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
    seconds: float = 10.0,
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
        seconds=seconds,
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
