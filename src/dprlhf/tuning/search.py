"""The search for settings on public prompts, with Optuna: no user's row is opened.

Each trial is a stand-in run; the recipe as it is comes first, and trials that fall behind are
stopped. The best of many noisy trials is partly lucky, so the last third of the time runs the best
ones and the recipe as it is again, and only these runs decide. The tuned recipe is a file: the
given one, with other values and why, in comments.
"""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dprlhf.errors import DprlhfError, extra
from dprlhf.recipe import Recipe, dump_recipe, make_recipe
from dprlhf.recipe.loading import apply_overrides, put, read_settings
from dprlhf.runs.opening import recipe_digest
from dprlhf.tuning.public_rows import PublicRows
from dprlhf.tuning.space import Parameter, draw, with_settings
from dprlhf.tuning.stand_in import (
    EVALUATIONS,
    StoppedEarlyError,
    affordable,
    count_users,
    run_stand_ins,
)


@dataclass(frozen=True)
class Tried:
    """Settings that were tried, with their public reward."""

    changes: dict[str, Any]  # The changed keys with their values; empty for the recipe as it is
    score: float  # Mean over the runs of the public reward at the end, minus the KL penalty
    standard_error: float
    runs: int
    seconds: float
    kl: float  # Mean KL(π ‖ base) of a response at the end, in nats
    excess: float = 0.0  # :attr:`StandInRun.excess` of these settings

    def __str__(self) -> str:
        text = f"{self.runs} run{'s' * (self.runs != 1)}, KL {self.kl:.3g}"
        return f"{self.score:+.3f} ± {self.standard_error:.3f} ({text})"


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    recipe: Recipe
    own: Tried  # The recipe as it was, in the runs that decided
    best: Tried  # The settings that were chosen; those of own where nothing was better
    decided: list[Tried]  # All settings between which the last runs decided, the best one first
    searched: list[Tried]  # All settings whose trials ended, in the search, the best one first
    stopped: int
    failed: list[str]  # Messages of trials whose settings the recipe refused
    users: int  # Number N of private users that the runs imitate
    stand_ins: int  # Number N′ of stand-ins in a run
    prompts: int  # Number of distinct public prompts that they are drawn from
    scored: int  # Number of other public prompts on which the reward was measured


def ranked(trials: Sequence[Any]) -> list[Tried]:
    """Return the settings of Optuna's trials with their mean reward, the best one first."""
    groups: dict[str, list[Any]] = {}
    for trial in trials:
        groups.setdefault(changes_key(trial.user_attrs["changes"]), []).append(trial)
    return sorted(map(_tried, groups.values()), key=lambda tried: -tried.score)


def _tried(runs: Sequence[Any]) -> Tried:
    scores = np.array([t.value for t in runs])
    within = float(np.mean([t.user_attrs["standard_error"] for t in runs]))
    over = float(scores.std(ddof=1)) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
    return Tried(
        changes=runs[0].user_attrs["changes"],
        score=float(scores.mean()),
        # Runs share the prompts, so that the error over prompts does not fall with their number.
        standard_error=float(np.hypot(over, within)),
        runs=len(runs),
        seconds=float(np.mean([t.user_attrs["seconds"] for t in runs])),
        kl=float(np.mean([t.user_attrs["kl"] for t in runs])),
        excess=runs[0].user_attrs["excess"],
    )


def changes_key(changes: dict[str, Any]) -> str:
    """Return changed settings as text that identifies them, whatever their order."""
    return json.dumps(changes, sort_keys=True)


def changes_text(changes: dict[str, Any]) -> str:
    """Return changed settings in one line for a person, such as ``rounds=8``."""
    return ", ".join(f"{k}={json.dumps(v)}" for k, v in changes.items()) or "the recipe as it is"


_WIDTH = 98
_SHOWN = 6
"""The most settings whose rewards are listed, the best ones first."""


def write_tuned(tuned: Tuned, source: Path, overrides: Sequence[str], output: Path) -> None:
    """Write the tuned recipe: the keys of the given one, with better values where there are any."""
    lines = [
        line for part in header(tuned).splitlines() for line in textwrap.wrap(part, _WIDTH) or [""]
    ]
    head = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    settings = read_settings(source)
    apply_overrides(settings, overrides)
    for key, value in tuned.best.changes.items():
        put(settings, key, value)
    if "update.name" in tuned.best.changes:  # another update has other settings
        values = tuned.recipe.update.model_dump(mode="json")
        settings["update"] = {k: v for k, v in values.items() if k in settings["update"]}
    text = head + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    if _read(text) != tuned.recipe:  # a spelling of YAML's
        text = head + dump_recipe(tuned.recipe)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DprlhfError(f"{output}: could not be written ({error.strerror})") from None


def header(tuned: Tuned) -> str:
    """Return what the settings come from, in a few lines."""
    ended, refused = sum(t.runs for t in tuned.searched), len(tuned.failed)
    thinned = tuned.stand_ins < tuned.users
    lines = [
        f"Tuned by dprlhf tune on public prompts, at no privacy cost: {tuned.prompts:,} prompts"
        f" stood in for the {tuned.users:,} users"
        + (
            f" ({tuned.stand_ins:,} stand-ins a run at the noise of all, whose sampling adds up to"
            f" {tuned.best.excess:.0%} of the noise's variance)"
            if thinned
            else ""
        )
        + f". {ended} trials ended, {tuned.stopped} were stopped early"
        + (f", {refused} were refused" if refused else "")
        + f". Reward at the end on {tuned.scored} other public prompts ± standard error of its"
        " rise, and KL to the base model in nats a response:",
    ]
    best = tuned.decided[:_SHOWN]
    shown = best if tuned.own in best else [*best, tuned.own]
    lines += [f"  {changes_text(one.changes)}: {one}" for one in shown]
    if not tuned.best.changes:
        lines.append("  nothing that was tried is better, so nothing has changed")
    lines.append(
        "These rewards chose the settings, so they flatter them: compare runs by their evaluation,"
        " whose prompts were not used."
    )
    return "\n".join(lines)


def _read(text: str) -> Recipe | None:
    try:
        return make_recipe(yaml.safe_load(text))
    except (DprlhfError, yaml.YAMLError):
        return None


SEARCH_SHARE = 2 / 3
"""Share of the time that is for the search; the rest runs the best ones again."""

CANDIDATES = 3
CONFIRMATIONS = 4
_TRIALS_PLANNED = 12
"""The least number of trials that a search should have time for, or its stand-ins are fewer."""


Write = Callable[[str], None]
"""Gets a line about what has ended."""


class Search:
    """A search that can be continued: its trials are kept in a file as they end."""

    def __init__(
        self,
        recipe: Recipe,
        public: PublicRows,
        keys: Sequence[str],
        storage: Path,
        *,
        minutes: float = 30.0,
        trials: int | None = None,
        users: int | None = None,
        stand_ins: int | None = None,
        reward: Any = None,
        seed: int = 0,
    ) -> None:
        self._started = time.monotonic()
        self._optuna = _optuna()
        self._recipe, self._public, self._keys, self._reward = recipe, public, list(keys), reward
        if not 0 < minutes < math.inf:
            raise DprlhfError(f"tune: minutes must be a positive number, not {minutes}")
        self._seconds, self._most = 60 * minutes, trials
        self.users = users if users is not None else count_users(recipe)
        terms = {
            "recipe": recipe_digest(recipe),
            "keys": list(keys),
            "users": self.users,
            "prompts": [len(public.stand_ins), public.scored, public.digest],
        }
        self._study = self._open(storage, terms, seed)
        kept = self._study.user_attrs.get("stand_ins")
        seconds = SEARCH_SHARE * self._seconds / _TRIALS_PLANNED
        self.stand_ins: int = (
            stand_ins
            or kept
            or affordable(recipe, public, seconds, users=self.users, reward=reward)
        )
        if kept not in (None, self.stand_ins):
            raise DprlhfError(
                f"{storage}: its trials have {kept} stand-ins, and their rewards are not to be"
                f" compared with those of {self.stand_ins}: leave --stand-ins out, or remove the"
                " file"
            )
        self._study.set_user_attr("stand_ins", self.stand_ins)
        self._before: Callable[[], None] = lambda: None

    def run(
        self, write: Write = lambda line: None, beat: Callable[[], None] = lambda: None
    ) -> None:
        """Run trials until the time or their number is up, then the best ones again."""
        self._before = beat
        while self._time_for_one(SEARCH_SHARE) and not self._enough():
            self._line_up()
            self._trial(write)
        while (settings := self._to_confirm()) is not None and self._time_for_one(1.0):
            parameters = settings.params
            self._study.enqueue_trial(parameters, user_attrs={"confirms": True})
            self._trial(write)

    def result(self) -> Tuned:
        """Return what has been found so far."""
        searched, confirmed = self._ended(confirming=False), self._ended(confirming=True)
        tried = ranked(searched)
        if not any(t.changes == {} for t in tried):
            raise DprlhfError(
                "tune: the recipe as it is has not been tried to the end: give it more --minutes or"
                " fewer --stand-ins, or call again"
            )
        decided = ranked(confirmed)
        # Runs of the search are not to be compared with these: they decide among themselves, where
        # there was time for the recipe as it is and for something else.
        if len(decided) < 2 or not any(t.changes == {} for t in decided):
            decided = tried
        own = next(t for t in decided if not t.changes)
        best = decided[0]
        states = [t.state.name for t in self._study.trials]
        return Tuned(
            recipe=with_settings(self._recipe, best.changes),
            own=own,
            best=best,
            decided=decided,
            searched=tried,
            stopped=states.count("PRUNED"),
            failed=[t.user_attrs["error"] for t in self._study.trials if "error" in t.user_attrs],
            users=self.users,
            stand_ins=self.stand_ins,
            prompts=min(self.stand_ins, len(self._public.stand_ins)),
            scored=self._public.scored,
        )

    # --- trials ---------------------------------------------------------------------------------

    def _line_up(self) -> None:
        """Put next in line what is tried before the sampler proposes anything, if some is left."""
        # The recipe as it is, then other learning rates, once each. One at a time: what is in line
        # when the search ends would be run in place of the runs that decide.
        begun = {t.user_attrs.get("factor") for t in self._study.trials}
        ended = [t.user_attrs["changes"] for t in self._ended(confirming=False)]
        others = (5.0, 1 / 5) if "optimizer.learning_rate" in self._keys else ()
        factors = [f for f in others if f not in begun] if {} in ended else [1.0]
        if factors:
            about = {"factor": factors[0]}
            self._study.enqueue_trial(self._own_parameters(factors[0]), user_attrs=about)

    def _trial(self, write: Write) -> None:
        """Run one trial, of the settings that are next in line or that the sampler proposes."""
        trial = self._study.ask()
        states = self._optuna.trial.TrialState
        first = not self._ended(confirming=False)

        def suggested(p: Parameter) -> Any:
            if p.choices is not None:
                return trial.suggest_categorical(p.name, p.choices)
            return trial.suggest_float(p.name, p.low, p.high, log=True)

        changes = draw(self._recipe, self._keys, suggested)
        trial.set_user_attr("changes", changes)
        confirming = trial.user_attrs.get("confirms", False)
        name = f"{'run again' if confirming else 'trial'} {trial.number}: {changes_text(changes)}"

        def stop(t: int, reward: float) -> bool:
            self._before()
            trial.report(reward, EVALUATIONS * t // rounds)
            return not confirming and not first and trial.should_prune()

        try:
            recipe = with_settings(self._recipe, changes)
            rounds = recipe.rounds
            run = run_stand_ins(
                recipe,
                self._public,
                users=self.users,
                stand_ins=self.stand_ins,
                reward=self._reward,
                seed=trial.number,
                stop=stop,
            )
        except StoppedEarlyError:
            self._study.tell(trial, state=states.PRUNED)
            write(f"{name}: stopped early")
        except DprlhfError as error:
            if first:
                self._study.tell(trial, state=states.FAIL)
                raise
            trial.set_user_attr("error", str(error))
            self._study.tell(trial, state=states.FAIL)
            write(f"{name}: {error}")
        except BaseException:
            self._study.tell(trial, state=states.FAIL)
            raise
        else:
            trial.set_user_attr("standard_error", run.rise.standard_error)
            for key in ("kl", "excess", "seconds"):
                trial.set_user_attr(key, getattr(run, key))
            self._study.tell(trial, run.score)
            write(f"{name}: {run.score:+.3f} ± {run.rise.standard_error:.3f}, KL {run.kl:.3g}")
        self._before()

    def _to_confirm(self) -> Any:
        """Return the trial whose settings are to be run again next; None if all have been."""
        searched, confirmed = self._ended(confirming=False), self._ended(confirming=True)
        best = [t.changes for t in ranked(searched)][:CANDIDATES]
        counts = {changes_key({}): 0, **{changes_key(changes): 0 for changes in best}}
        for trial in confirmed:
            if (key := changes_key(trial.user_attrs["changes"])) in counts:
                counts[key] += 1
        known = {changes_key(t.user_attrs["changes"]) for t in searched}
        counts = {k: runs for k, runs in counts.items() if k in known}
        if len(counts) < 2:
            return None  # there is nothing to decide
        key = min(counts, key=lambda k: (counts[k], k != changes_key({})))
        if counts[key] >= CONFIRMATIONS:
            return None
        return next(t for t in searched if changes_key(t.user_attrs["changes"]) == key)

    def _ended(self, *, confirming: bool) -> list[Any]:
        trials = self._study.get_trials(
            deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,)
        )
        return [t for t in trials if t.user_attrs.get("confirms", False) == confirming]

    def _own_parameters(self, factor: float) -> dict[str, Any]:
        """Return the parameters of the recipe as it is, with a multiple of its learning rate."""
        parameters: dict[str, Any] = {}

        def own(parameter: Parameter) -> Any:
            scaled = factor if parameter.key == "optimizer.learning_rate" else 1.0
            value = parameter.own if parameter.choices is not None else scaled * parameter.own
            parameters[parameter.name] = value
            return value

        draw(self._recipe, self._keys, own)
        return parameters

    # --- time and storage -----------------------------------------------------------------------

    def _time_for_one(self, share: float) -> bool:
        """Return whether another run of median duration ends within this share of the time."""
        ended = [*self._ended(confirming=False), *self._ended(confirming=True)]
        usual = float(np.median([t.user_attrs["seconds"] for t in ended])) if ended else 0.0
        return time.monotonic() - self._started + usual <= share * self._seconds

    def _enough(self) -> bool:
        of_search = [t for t in self._study.trials if "confirms" not in t.user_attrs]
        over = [t for t in of_search if t.state.is_finished()]
        return self._most is not None and len(over) >= self._most

    def _open(self, storage: Path, terms: dict[str, Any], seed: int) -> Any:
        optuna = self._optuna
        try:
            storage.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(storage)
            backend = optuna.storages.journal.JournalFileBackend(str(storage))
            study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name="tune",
                direction="maximize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
            )
        except (OSError, ValueError, KeyError) as error:
            raise DprlhfError(f"{storage}: no file of trials ({type(error).__name__})") from None
        kept = study.user_attrs.get("terms")
        if kept not in (None, terms):
            differs = ", ".join(name for name in terms if kept.get(name) != terms[name])
            raise DprlhfError(
                f"{storage}: has the trials of another search ({differs}): remove it, or choose"
                " another --output"
            )
        study.set_user_attr("terms", terms)
        # The sampler's state is not kept: with one seed, each call would propose the same again.
        own = (seed + len(study.trials)) % 2**32  # what NumPy takes
        study.sampler = optuna.samplers.TPESampler(seed=own, multivariate=True)
        for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)  # it was killed
        return study


def _cut_unfinished_line(storage: Path) -> None:
    """Remove what a crash left of the last line, to which the next line would be appended."""
    if storage.is_file() and not (kept := storage.read_bytes()).endswith(b"\n"):
        with storage.open("rb+") as file:
            file.truncate(kept.rfind(b"\n") + 1)


def _optuna() -> Any:
    with extra("tune", "dprlhf tune"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
