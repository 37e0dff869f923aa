"""A stand-in run: the training of a recipe on public prompts, at the noise of the private run.

With N′ stand-ins for N users, a round has m′ = m·N′/N of them in expectation, and the noise
multiplier is z′ = z·m′/m, so the noise in the released mean is z′S/m′ = zS/m, as in the private
run; so is the number of rounds, and the code. Nothing is charged and no ε is stated. Where there
are fewer than N′ public prompts, they are repeated in shuffled order.

What differs. *Thinning*, N′ < N: the mean over m′ users varies more than that over m. Clipped
contributions have squared norm at most S², so the excess variance is at most S²(1/m′ − 1/m) over
all d dimensions, where the noise has d(zS/m)²: a ratio of m(N/N′ − 1)/(d z²),
:attr:`StandInRun.excess`. *Few distinct prompts*: their mean is off from that of all public prompts
by at most S/√n, in the same direction in every round; the score is taken on others. *Another kind
of prompt*: what public prompts do not show, such as a taste that only users have, a stand-in run
cannot show either. A stand-in has one prompt, also where users have several.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dprlhf.data.in_memory import InMemoryInputs, rows_of
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError, one_line
from dprlhf.privacy.accounting import PrivacyCost
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import IN_MEMORY, PublicData, Recipe
from dprlhf.runs.folder import RunFolder
from dprlhf.training.build import open_run, plan_of
from dprlhf.training.dry_run import dry_run
from dprlhf.training.evaluate import Evaluated, RewardEstimate, estimate, measure, token_logs
from dprlhf.training.run import Run
from dprlhf.training.trainer import run_rounds
from dprlhf.tuning.public_rows import PublicRows

NO_USERS = "none: the users are public prompts that stand in for private ones"

EVALUATIONS = 4
"""About how many evaluations a stand-in run has, unless the caller says how often."""


class StoppedEarlyError(DprlhfError):
    """A stand-in run that its caller stopped, because its public reward was not promising."""


@dataclass(frozen=True)
class StandInRun:
    """The result of a stand-in run; everything in it comes from public prompts."""

    plan: Plan  # The plan of the private run that was imitated, with its guarantee
    stand_ins: int  # Number N′ of stand-ins
    prompts: int  # Number n of distinct public prompts that they were drawn from
    dimension: int
    before: RewardEstimate  # Mean reward of the base model on the scoring prompts
    after: RewardEstimate  # Mean reward of the tuned policy on the same prompts
    rise: RewardEstimate  # The mean of after − before on the same prompts and draws
    curve: list[tuple[int, float]]
    kl: float  # KL(π ‖ base) of a response at the end, in nats
    penalty: float  # The KL penalty at the end, kl.beta · kl, in units of the reward
    seconds: float

    @property
    def score(self) -> float:
        """Return what settings are compared by: the reward at the end minus the KL penalty."""
        return self.after.mean - self.penalty

    @property
    def excess(self) -> float:
        """Return the largest excess of sampling variance, as a share of the noise's variance."""
        return excess_variance(self.plan, self.stand_ins, self.dimension)


def excess_variance(plan: Plan, stand_ins: int, dimension: int) -> float:
    """Bound the variance that thinning adds to a round's mean, over that of the noise."""
    thinned = plan.users / stand_ins - 1
    if thinned <= 0:
        return 0.0
    noise = dimension * plan.noise_multiplier**2
    return plan.expected_batch_size * thinned / noise if noise else math.inf


def count_users(recipe: Recipe) -> int:
    """Return the number N of the recipe's users, which is public, without opening a user's row."""
    # Rows, or different users, are counted. Where rows are not on this machine, N is data.limit.
    data = recipe.data
    if data.user_column is None and data.limit is not None and not Path(data.path).exists():
        return data.limit
    rows = rows_of(recipe.data, None)
    return Users(rows, recipe.data, may_lack_prompts=recipe.rows_may_lack_prompts).count


def stand_in_plan(private: Plan, stand_ins: int, clip_norm: float | None = None) -> Plan:
    """Return the plan of a run of stand-ins whose released means have the private run's noise."""
    mechanism = private.mechanism
    if stand_ins < mechanism.rounds:
        raise DprlhfError(
            f"tuning: {stand_ins} stand-ins cannot fill {mechanism.rounds} rounds: take at least"
            f" {mechanism.rounds}"
        )
    batch = (
        float(stand_ins // mechanism.rounds)
        if mechanism.spec.disjoint
        else mechanism.participations * stand_ins / mechanism.rounds
    )
    z = private.noise_multiplier * batch / private.expected_batch_size
    return Plan(
        users=stand_ins,
        mechanism=mechanism.with_noise(z),
        clip_norm=private.clip_norm if clip_norm is None else clip_norm,
        expected_batch_size=batch,
        guarantee=PrivacyCost(math.inf, math.inf, private.guarantee.delta, NO_USERS, ()),
    )


def run_stand_ins(
    recipe: Recipe,
    public: PublicRows,
    *,
    users: int | None = None,
    stand_ins: int | None = None,
    every: int | None = None,
    reward: Any = None,
    seed: int = 0,
    stop: Callable[[int, float], bool] = lambda t, reward: False,
) -> StandInRun:
    """Train a recipe on public prompts in place of its users, and measure the public reward."""
    # No private row is opened, nothing is charged, and the temporary run folder is removed.
    started = time.perf_counter()
    private = plan_of(recipe, users if users is not None else count_users(recipe))
    count = stand_ins or private.users
    sources = _sources(private, public, count, reward, seed)
    every = every or math.ceil(recipe.rounds / EVALUATIONS)
    curve: list[tuple[int, float]] = []

    def evaluated(metrics: dict[str, Any]) -> None:
        if "public_reward" in metrics:
            curve.append((metrics["round"], metrics["public_reward"]))
            if stop(*curve[-1]):
                raise StoppedEarlyError(f"stopped after round {metrics['round']}")

    with (
        _temporary_folder() as folder,
        open_run(
            _of_stand_ins(recipe, public, every, reward is not None),
            folder,
            sources,
            create=True,
            callbacks=[evaluated],
            quiet=True,
            counted=False,  # its users are public prompts
        ) as run,
    ):
        with run.policy.base():
            first = _evaluate(run)
        run_rounds(run)
        last = _evaluate(run)
        logs = token_logs(run.policy, last.responses, recipe.update.batch_size)
        kl = measure(run.policy, last.responses, logs)["kl"].mean
    before, after = first.estimate, last.estimate
    return StandInRun(
        plan=private,
        stand_ins=count,
        prompts=min(count, len(public.stand_ins)),
        dimension=recipe.update.subspace.rank if recipe.update.subspace else run.policy.dimension,
        before=before,
        after=after,
        rise=estimate(last.rewards - first.rewards),
        curve=[(0, before.mean), *curve, (recipe.rounds, after.mean)],
        kl=kl,
        penalty=recipe.kl.beta * kl,
        seconds=time.perf_counter() - started,
    )


def affordable(
    recipe: Recipe, public: PublicRows, seconds: float, *, users: int, reward: Any = None
) -> int:
    """Return the number of stand-ins with which a run takes about ``seconds``, at most N."""
    # Measured on a micro-batch of public prompts. At least eight stand-ins for each round.
    private = plan_of(recipe, users)
    sources = _sources(private, public, users, reward, 0)
    with contextlib.redirect_stderr(io.StringIO()):
        asked = _of_stand_ins(recipe, public, recipe.rounds, reward is not None)
        estimated: float = dry_run(asked, sources)["estimated_seconds"]
    return min(users, max(8 * recipe.rounds, math.floor(users * seconds / estimated)))


def _sources(
    private: Plan, public: PublicRows, count: int, reward: Any, seed: int
) -> InMemoryInputs:
    return InMemoryInputs(
        public.stand_ins.select(_repeated(len(public.stand_ins), count, seed)),
        reward,
        public.scoring,
        stand_in_plan=lambda recipe: stand_in_plan(private, count, recipe.update.clip_norm),
    )


def _evaluate(run: Run) -> Evaluated:
    evaluated = run.stage.evaluate(run, "evaluation")
    assert isinstance(evaluated, Evaluated)
    return evaluated


def _of_stand_ins(recipe: Recipe, public: PublicRows, every: int, in_memory: bool) -> Recipe:
    """Return the recipe of a stand-in run: public rows, no promise, no reports."""
    place = PublicData(path=IN_MEMORY)
    values = recipe.model_dump()
    values |= {
        "data": place.like(recipe.data).model_dump(exclude_unset=True),
        "evaluation": {
            "data": place.model_dump(),
            "prompts": public.scored,
            "every": every,
            "declared_public": True,
        },
        "privacy": recipe.privacy.asking(epsilon=math.inf).model_dump()
        | {"tuning_runs": None, "book": "none"},
        "previous": [],
        "tracking": {},
        "output_dir": None,
    }
    if in_memory:
        values["rewards"] = [{"function": IN_MEMORY}]
    return Recipe.model_validate(values)


def _repeated(rows: int, count: int, seed: int) -> Sequence[int]:
    """Return positions of public rows for ``count`` stand-ins: whole permutations, then a part."""
    generator = np.random.default_rng(seed)
    permutations = [generator.permutation(rows) for _ in range(-(-count // rows))]
    drawn: list[int] = np.concatenate(permutations)[:count].tolist()
    return drawn


@contextlib.contextmanager
def _temporary_folder() -> Any:
    """Yield a run folder that is removed, and show what went wrong in it: the rows are public."""
    with tempfile.TemporaryDirectory(prefix="dprlhf-stand-ins-") as place:
        folder = RunFolder(Path(place) / "no-private-run")
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # what a private run should be told
                yield folder
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # there is no folder to resume
        except DprlhfError:
            report = folder.secret / "error.txt"
            if not report.is_file():
                raise
            message = one_line(report.read_text("utf-8").strip().splitlines()[-1])
            raise DprlhfError(f"the run on stand-ins failed: {message}") from None
