"""Trial runs of the planner's choices: public prompts stand in for the users.

``dprlhf plan RECIPE`` predicts the rise of the reward from one measurement at the start of a run,
which ranks choices but is no reward. A trial run (:mod:`dprlhf.tuning.stand_in`) trains with a
choice's own noise and measures the rise. It takes as long as the private run, and spends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dprlhf.recipe import Recipe
from dprlhf.training.choices import Choice
from dprlhf.training.planner import with_choice
from dprlhf.tuning.public_rows import PublicRows
from dprlhf.tuning.stand_in import run_stand_ins


@dataclass(frozen=True)
class TriedChoice:
    """A choice of the planner with the rises of its trial runs.

    Attributes:
        choice: The choice.
        rises: Rise of the mean public reward in each run, ``[runs]``.
        error: Standard error of a run's rise over its prompts, which all runs share.
    """

    choice: Choice
    rises: Sequence[float]
    error: float

    @property
    def rise(self) -> float:
        """Return the mean rise, which predicts that of the private run."""
        return float(np.mean(self.rises))

    @property
    def standard_error(self) -> float:
        """Return the standard error of :attr:`rise`: over prompts, together with that over runs."""
        runs = len(self.rises)
        over = float(np.std(self.rises, ddof=1)) / runs**0.5 if runs > 1 else 0.0
        return float(np.hypot(over, self.error))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        trial = {"rises": list(self.rises), "rise": self.rise, "error": self.standard_error}
        return {**self.choice.as_dict(), "trial_runs": trial}


def try_choices(
    recipe: Recipe,
    choices: Sequence[Choice],
    public: PublicRows,
    *,
    runs: int,
    users: int,
    reward: Any = None,
    told: Callable[[str], None] = lambda line: None,
) -> list[TriedChoice]:
    """Run choices on public prompts in place of the users; the largest rise comes first.

    Args:
        recipe: The recipe that was planned.
        choices: The planner's choices for it.
        public: The public prompts, from :func:`~dprlhf.tuning.public_rows.public_rows`; those of
            the recipe's own evaluation are not among them.
        runs: Number of runs of each choice; they differ in sampling, noise and the prompts' order.
        users: Number N of private users.
        reward: One or several reward functions in memory in place of the recipe's.
        told: Gets a line when a run ends.

    Raises:
        DprlhfError: The recipe cannot be run; the message says why.
    """
    tried = []
    for number, choice in enumerate(choices, start=1):
        chosen = with_choice(recipe, choice.candidate)
        done = []
        for seed in range(runs):
            done.append(run_stand_ins(chosen, public, users=users, reward=reward, seed=seed))
            told(f"choice {number}, run {seed + 1}: rise {done[-1].rise.mean:.3f}")
        error = float(np.mean([run.rise.standard_error for run in done]))
        tried.append(TriedChoice(choice, [run.rise.mean for run in done], error))
    return sorted(tried, key=lambda t: -t.rise)
