"""A run of any stage: what it is made of, and the protocol for what differs between stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.boundary import BoundedSum, Private, Released
from dprlhf.data.users import Prompts, Users
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.partition import Allocation
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import AnyRecipe
from dprlhf.runs.earlier import Earlier
from dprlhf.runs.folder import RunFolder
from dprlhf.training.processes import Processes
from dprlhf.training.progress import Progress, RoundBar
from dprlhf.updates.critic import Critic


@dataclass(repr=False)
class Parts:
    """A run before anything is written: settings, data and models, loaded and checked.

    Attributes:
        plan: The privacy plan; :meth:`Stage.settle` may change its clip norm.
        earlier: The earlier runs whose privacy cost counts towards the total.
        users: The private users.
        policy: The model that is trained.
        public: All public rows of the recipe's evaluation; None without one.
        processes: This process among those of the launch.
        quiet: Whether to print nothing.
    """

    plan: Plan
    earlier: Earlier
    users: Users
    policy: CausalLMPolicy
    public: Users | None
    processes: Processes
    quiet: bool


@dataclass(repr=False)
class Run:
    """A run that can train: its parts, its folder, and the only way to release anything.

    :func:`dprlhf.training.build.open_run` makes it.

    Attributes:
        recipe: The settings, with nothing left open.
        stage: What this kind of run learns from its users.
        plan: The privacy plan: partition, noise and guarantee.
        earlier: The earlier runs whose privacy cost counts towards the total.
        folder: Where the run writes.
        key: The secret key that allocation and noise come from.
        processes: This process among those of the launch.
        users: The private users.
        allocation: Which users each round has.
        policy: The model that is trained.
        optimizer: The server-side optimizer of the policy's parameters.
        gate: The only exit for values computed from users. Only the main process has it, so that
            the ledger has one writer.
        progress: The progress bars.
        callbacks: Functions that get each round's public and released metrics.
    """

    recipe: AnyRecipe
    stage: Stage
    plan: Plan
    earlier: Earlier
    folder: RunFolder
    key: bytes
    processes: Processes
    users: Users
    allocation: Private[Allocation]
    policy: CausalLMPolicy
    optimizer: torch.optim.Optimizer
    gate: Gate | None
    progress: Progress
    callbacks: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class Batch:
    """A round's users on this process, and the tools to work on them.

    Attributes:
        t: The round, from 1.
        users: Indices of this process's users, ``[users]``.
        release: The gate for this round: turns the clipped sum over all processes into a noised
            mean, and charges the round on its first call.
        bar: The round's progress bar.
        tick: Moves the bar on by a number of rows; raises at an interrupt before the charge.
    """

    t: int
    users: Private[NDArray[np.int64]]
    release: Callable[[BoundedSum], Released[torch.Tensor]]
    bar: RoundBar
    tick: Callable[[int], None]


@dataclass(frozen=True, repr=False)
class Outcome:
    """What a stage did in a round, after the policy moved.

    Attributes:
        released: The round's first release, ``[dimension]`` where it is a gradient.
        norms: The L2 norm of each user's contribution before clipping, ``[users]``.
        metrics: Further released values for the round's line of metrics.
        secret: Further raw values for ``secret/``, JSON-ready.
    """

    released: Released[torch.Tensor]
    norms: Private[NDArray[np.float64]]
    metrics: dict[str, Any]
    secret: Private[dict[str, Any]]


class Stage(Protocol):
    """What one kind of run does differently from another: private updates, SFT, a reward model.

    The methods are called in the order in which they stand here. A stage keeps the recipe, because
    :meth:`settle` replaces what the recipe leaves open to the machine and the data.

    Attributes:
        rows_a_user: Rows of a user in each phase of a round, for the progress bar.
        warnings: What the operator should know before the first round, a sentence each.
    """

    @property
    def recipe(self) -> AnyRecipe:
        """The recipe, settled as far as the run has come."""

    @property
    def critic(self) -> Critic | None:
        """The critic, whose state belongs into the checkpoint; None without one."""

    @property
    def public(self) -> Prompts | None:
        """The public rows that evaluation takes; None without evaluation."""

    @property
    def rows_a_user(self) -> int:
        """The most rows that a user has in one phase of a round."""

    @property
    def warnings(self) -> list[str]:
        """What the operator should know before the first round, a sentence each."""

    def load_policy(self) -> CausalLMPolicy:
        """Load the model that is trained.

        Raises:
            DprlhfError: it cannot be loaded, or the recipe's rows do not fit into its context.
        """

    def check_rows(self, rows: Any) -> None:
        """Refuse private rows that cannot be learnt from; the error quotes none of them.

        Raises:
            DprlhfError: a row lacks a value or has one that the stage does not know.
        """

    def check_policy(self, users: Users, policy: CausalLMPolicy) -> None:
        """Refuse a model that cannot do what the recipe asks.

        Raises:
            DprlhfError: for example, it has no chat template, and the prompts are conversations.
        """

    def settle(self, parts: Parts) -> None:
        """Decide what the recipe leaves open, on PUBLIC rows and the machine alone."""

    def load(self, parts: Parts) -> None:
        """Load and check what else the stage needs, such as rewards.

        Args:
            parts: With the plan of the settled recipe.
        """

    def opened(self, folder: RunFolder) -> AbstractContextManager[None]:
        """Hold open the stage's own files in the run folder."""

    def evaluate(self, run: Run, description: str) -> Any:
        """Evaluate the policy on public rows; something false without any."""

    def seconds_a_round(self, run: Run) -> float | None:
        """Measure on PUBLIC rows how long a round takes one process; None without such rows."""

    def update(self, run: Run, batch: Batch) -> Outcome:
        """Do a round's private work, release its sum through the gate, and move the policy."""

    def public_metrics(self, run: Run, t: int) -> dict[str, float]:
        """Evaluate on public rows after round t; the main process alone does so."""

    def check_round(self, run: Run, t: int) -> None:
        """Stop the run where what was RELEASED shows that it cannot succeed.

        Raises:
            DprlhfError: what to look at before the run goes on.
        """

    def write(self, run: Run, before: Any, after: Any) -> None:
        """Write what the stage leaves beside the policy; the main process alone does so."""

    def result(self, run: Run, before: Any, after: Any) -> Any:
        """Return what the caller of :func:`dprlhf.train` or ``train_stage`` gets."""
