"""A run of any stage: its parts, and the protocol of a stage, :class:`Stage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import budget
from dprlhf.boundary import BoundedSum, Private, Released
from dprlhf.data.public import Guides
from dprlhf.data.users import Prompts, Users
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.gaussian import upwards
from dprlhf.privacy.partition import Allocation
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import AnyRecipe
from dprlhf.runs.checkpoint import Stateful
from dprlhf.runs.earlier import Earlier
from dprlhf.runs.folder import RunFolder
from dprlhf.training.made_up_rounds import Shapes
from dprlhf.training.processes import Processes
from dprlhf.training.progress import Progress, RoundBar


class Summarised:
    """A result with a short representation; a notebook shows it as a table."""

    @property
    def summary(self) -> list[tuple[str, str]]:
        """What is worth a look, as pairs of a name and a value."""
        raise NotImplementedError

    def __repr__(self) -> str:
        lines = ", ".join(f"{name}: {value}" for name, value in self.summary)
        return f"<{type(self).__name__}: {lines}>"

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in self.summary)
        return f"<table>{''.join(rows)}</table>"


def summary_of(folder: RunFolder, plan: Plan, means: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the folder, the guarantee, and each public mean before and after a run."""
    promise = "none (a baseline)"
    if plan.private:
        promise = f"epsilon {upwards(plan.guarantee.epsilon, 4)} at delta {plan.guarantee.delta:g}"
    values = {n: f"{b.mean:.4g} before, {a.mean:.4g} after" for n, (b, a) in means.items()}
    return [("run folder", str(folder.path)), ("this run's guarantee", promise), *values.items()]


@dataclass(repr=False)
class PreparedRun:
    """The parts of a run before anything is written: plan, data and model, loaded and checked."""

    recipe: AnyRecipe  # The settings with nothing left open, as they are written to the run folder
    plan: Plan  # The privacy plan; :meth:`Stage.settle` may change its clip norm
    earlier: Earlier  # The earlier runs whose privacy cost counts towards the total
    users: Users
    policy: CausalLMPolicy
    public: Users | None  # All public rows of the recipe's evaluation; None without one
    processes: Processes
    quiet: bool
    rounding: str = ""  # What the check of rounding on this machine covered, for the privacy card
    guides: Guides | None = None


@dataclass(repr=False, kw_only=True)
class Run(PreparedRun):
    """A run that is ready to train: its parts, its folder, and the gate for releases.

    :func:`dprlhf.training.build.open_run` creates it.
    """

    stage: Stage
    reservation: budget.Reservation | None  # In the budget book; None without a book
    folder: RunFolder
    key: bytes  # The secret key that allocation and noise are derived from
    allocation: Private[Allocation]
    optimizer: torch.optim.Optimizer
    # The only exit for values computed from users; on the main process alone, so one ledger writer
    gate: Gate | None
    progress: Progress
    callbacks: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    # Sets torch's settings to those that the run was checked with
    put_back_torch_state: Callable[[], None] = lambda: None
    told_operator: bool = False  # Whether secret/ has the first error of a reward


@dataclass(frozen=True, repr=False)
class Batch:
    """A round's users on this process, with the round's release function and progress bar."""

    t: int
    users: Private[NDArray[np.int64]]  # Indices of this process's users, [users]
    # The gate for this round: turns the clipped sum over all processes into a noised mean, and
    # charges the round on its first call
    release: Callable[[BoundedSum], Released[torch.Tensor]]
    bar: RoundBar
    tick: Callable[[int], None]  # Moves the bar on; raises at an interrupt before the charge


@dataclass(frozen=True, repr=False)
class Outcome:
    """The result of a round, after the policy moved."""

    # The round's first release, [dimension] where it is a gradient
    released: Released[torch.Tensor]
    # The L2 norm of each user's contribution before clipping, [users]
    norms: Private[NDArray[np.float64]]
    metrics: dict[str, Any]
    secret: Private[dict[str, Any]]  # Further raw values for secret/, JSON-ready


class Stage(Protocol):
    """One kind of training run: private updates (RL), SFT, or a reward model.

    The methods are called in the order in which they are defined here. A stage keeps the recipe,
    because :meth:`settle` replaces what the recipe leaves open to the machine and the data.
    """

    @property
    def recipe(self) -> AnyRecipe:
        """The recipe, settled as far as the run has come."""

    @property
    def stateful(self) -> Mapping[str, Stateful]:
        """The stage's own parts that a checkpoint keeps, by the name of the file."""

    @property
    def public(self) -> Prompts | None:
        """The public rows of the evaluation; None without evaluation."""

    @property
    def rows_a_user(self) -> int:
        """The most rows that a user has in one phase of a round."""

    @property
    def warnings(self) -> list[str]:
        """Sentences that the operator should read before the first round."""

    def load_policy(self, public: Users | None) -> CausalLMPolicy:
        """Load the model that is trained."""

    def check_rows(self, rows: Any) -> None:
        """Check that the stage can train on the private rows; an error quotes none of them."""

    def check_policy(self, users: Users, policy: CausalLMPolicy) -> None:
        """Check that the model supports what the recipe asks for."""

    def cut(self, policy: CausalLMPolicy, prompts: Prompts) -> list[bool]:
        """Return for each row whether it has more tokens than the recipe keeps, ``[prompts]``."""

    def settle(self, prepared: PreparedRun) -> None:
        """Decide what the recipe leaves open, on PUBLIC rows and the machine alone."""

    @property
    def shapes(self) -> Shapes:
        """The public numbers that decide the shapes of batches, as settled."""

    def load(self, prepared: PreparedRun) -> None:
        """Load and check what else the stage needs, such as rewards."""

    def rehearse(self, prepared: PreparedRun, folder: RunFolder) -> None:
        """Evaluate a few PUBLIC rows and write the stage's files, as at the end of the run."""

    def attach(self, folder: RunFolder) -> None:
        """Take the run folder, for what the stage writes during the rounds."""

    def evaluate(self, run: Run, description: str) -> Any:
        """Return the evaluation of the policy on public rows; a falsy value without such rows."""

    def seconds_a_round(self, run: Run) -> float | None:
        """Return the seconds of a round on one process, timed on PUBLIC rows; None without them."""

    def update(self, run: Run, batch: Batch) -> Outcome:
        """Compute a round's clipped sum, release it through the gate, and move the policy."""

    def public_metrics(self, run: Run, t: int) -> Mapping[str, float | None]:
        """Evaluate on public rows after round t; called on the main process only."""

    def check_round(self, run: Run, t: int) -> None:
        """Stop the run if the RELEASED values show that it cannot succeed."""

    def finish(self, run: Run) -> None:
        """Move the policy further, by what was released, once all rounds are saved."""

    def write(self, run: Run, before: Any, after: Any) -> None:
        """Write the stage's files beside the policy; called on the main process only."""

    def result(self, run: Run, before: Any, after: Any) -> Any:
        """Return the value that :func:`dprlhf.train` or ``train_stage`` returns."""
