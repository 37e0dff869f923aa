"""What a setting of another program becomes, as small functions that the tables are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dprlhf.errors import one_line
from dprlhf.recipe.loading import known_keys
from dprlhf.recipe.rl import Recipe
from dprlhf.recipe.supervised import STAGES


@dataclass(frozen=True)
class Finding:
    """What became of one setting.

    Attributes:
        name: The setting's name in the other program's file.
        kind: ``mapped``, ``no effect`` or ``refused``.
        about: The recipe's key and what differs, or the reason.
        settled_by: Keys of the recipe that answer a refusal once the caller gives them all; empty
            where only leaving the setting out does.
    """

    name: str
    kind: Literal["mapped", "no effect", "refused"]
    about: str
    settled_by: tuple[str, ...] = ()


@dataclass
class Draft:
    """A recipe in the making.

    Attributes:
        given: The other program's settings, with its defaults where they matter.
        stage: The stage of the recipe; ``rl`` for private updates.
        users: Number of users; None where the caller did not say.
        settings: The recipe so far.
    """

    given: dict[str, Any]
    stage: str
    users: int | None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> str:
        """The recipe's section of the model that is trained."""
        return "model" if self.stage == "reward" else "policy"

    def named(self, key: str) -> str:
        """Return a key of the stage's recipe, with ``model`` for the trained section."""
        first, dot, rest = key.partition(".")
        return f"{self.trained if first == 'model' else first}{dot}{rest}"

    def has(self, key: str) -> bool:
        """Return whether a recipe of the stage has a key, and it is not settled by the stage."""
        if self.stage == "reward" and key == "model.dtype":  # always float32
            return False
        return self.named(key) in set(known_keys(STAGES.get(self.stage, Recipe)))

    def put(self, key: str, value: Any) -> str:
        """Set a key of the stage's recipe, and return its name."""
        key = self.named(key)
        *parents, last = key.split(".")
        node = self.settings
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        return key


Rule = Callable[[str, Any, Draft], Finding]
"""Returns what becomes of a setting, given its name and value; may put keys into the draft."""

UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a rule may raise on a value that is not of its setting's kind."""

EMPTY: tuple[Any, ...] = (None, "", False, [], {})


def same(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def to(key: str, change: Callable[[Any], Any] = same, note: str = "") -> Rule:
    """Return the rule of a setting whose meaning is that of a recipe's key.

    Args:
        key: The recipe's key; ``model.…`` is the section of the model that is trained.
        change: Turns the value into the recipe's.
        note: What differs in words.
    """

    def rule(name: str, value: Any, draft: Draft) -> Finding:
        if value is None or value == "":
            return Finding(name, "no effect", "it is empty")
        if not draft.has(key):
            return Finding(name, "no effect", f"stage {draft.stage} has nothing of the kind")
        put = draft.put(key, change(value))
        return Finding(name, "mapped", f"{put}{'; ' if note else ''}{note}")

    return rule


def one_of(key: str, values: dict[Any, Any], reason: str, settled_by: Sequence[str] = ()) -> Rule:
    """Return the rule of a setting of which only some values have a counterpart.

    Args:
        key: The recipe's key.
        values: The recipe's value for each that has one.
        reason: Why another value is refused.
        settled_by: Keys of the recipe that answer the refusal.
    """

    def rule(name: str, value: Any, draft: Draft) -> Finding:
        if value is None or value == "":
            return Finding(name, "no effect", "it is empty")
        if value not in values and draft.has(key):
            return Finding(name, "refused", f"{value!r}: {reason}", tuple(settled_by))
        return to(key, values.get)(name, value, draft)

    return rule


def unused(reason: str) -> Rule:
    """Return the rule of a setting that changes nothing of what is learnt here."""
    return lambda name, value, draft: Finding(name, "no effect", reason)


def off(reason: str, settled_by: Sequence[str] = (), also: Sequence[Any] = ()) -> Rule:
    """Return the rule of a setting that must be empty, zero, or one of the values in ``also``."""

    def rule(name: str, value: Any, draft: Draft) -> Finding:
        if value in EMPTY or value == 0 or value in also:
            return Finding(name, "no effect", "as it is here")
        return Finding(name, "refused", reason, tuple(settled_by))

    return rule


def taken(name: str, *keys: str, note: str = "") -> Finding:
    """Return the finding of a setting that went into these keys together with others."""
    return Finding(name, "mapped", ", ".join(keys) + (f"; {note}" if note else ""))


def refused(name: str, reason: str, *settled_by: str) -> Finding:
    """Return the finding of a refused setting."""
    return Finding(name, "refused", reason, settled_by)


def unreadable(name: str, value: Any) -> Finding:
    """Return the finding of a setting whose value is not of its kind."""
    shown = "an empty value" if value is None else one_line(repr(value), 80)
    return refused(name, f"{shown} cannot be read")


def apply(rule: Rule, name: str, value: Any, draft: Draft) -> Finding:
    """Return what becomes of a setting; it is refused where its rule cannot read the value."""
    try:
        return rule(name, value, draft)
    except UNREADABLE:
        return unreadable(name, value)


def whole(value: Any) -> int:
    """Return a whole number, which may be written as a text."""
    number = float(value)
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def count(value: Any) -> int:
    """Return a whole number above 0, which may be written as a text."""
    number = whole(value)
    if number < 1:
        raise ValueError(f"{value!r} is not above 0")
    return number


LOGGED = unused("every round is logged, and leaves a checkpoint")
SPEED = unused("it changes how fast and in what memory a run goes, not what it learns")
SHARED = unused("how processes share the work is up to accelerate launch")
PREPARED = unused("rows are read as they are needed")

NO_DROPOUT = off("there is no dropout: leave it out or write 0")
NO_DECAY = off("there is no weight decay: leave it out or write 0")
NO_SPLIT = off(
    "a part of the users' rows would still be private: evaluate on public rows (evaluation.data)",
    ["evaluation"],
)

SCHEDULE = one_of(
    "optimizer.schedule",
    {"constant": "constant", "linear": "linear", "cosine": "cosine"},
    "the learning rate is constant, or falls along a line or a cosine",
    ["optimizer.schedule"],
)

OPTIMIZER = one_of(
    "optimizer.name",
    {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adam"), "adam"),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adam"),
        **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "adam"),
        "sgd": "sgd",
    },
    "the optimizers are sgd, normalized-sgd, adam and adam-corrected",
    ["optimizer.name"],
)

CLIPPED = unused("it clips the whole gradient; each user's is clipped to update.clip_norm instead")


def warmup_steps(name: str, value: Any, draft: Draft) -> Finding:
    """Turn a number of steps into a share of the rounds, which must be known by now."""
    rounds = draft.settings.get("rounds")
    if not value:
        return Finding(name, "no effect", "there is none")
    if isinstance(value, float) and value < 1:  # a share already
        return to("optimizer.warmup")(name, value, draft)
    if not rounds or value >= rounds:
        return refused(name, "set optimizer.warmup, a share of the rounds", "optimizer.warmup")
    return to("optimizer.warmup", lambda steps: round(steps / rounds, 4))(name, value, draft)


def reports(name: str, value: Any, draft: Draft) -> Finding:
    """Map the trackers; ``none`` and ``all`` are transformers' words."""
    names = value if isinstance(value, list) else [value]
    wanted = [n for n in names if n not in (None, "", "none")]
    known = {"tensorboard", "wandb", "mlflow", "trackio"}
    if set(wanted) - known:
        return refused(name, f"trackers are {', '.join(sorted(known))}", "tracking.report_to")
    if wanted:
        return to("tracking.report_to")(name, wanted, draft)
    return Finding(name, "no effect", "there is none")


def steps(
    draft: Draft, *, batch: int, epochs: float, max_steps: int | None, names: Sequence[str]
) -> list[Finding]:
    """Turn batch and epochs into rounds and participations, for every name that says them.

    Args:
        draft: The recipe in the making, with the number of users.
        batch: Users in a step, on one device.
        epochs: Passes over the data.
        max_steps: Number of steps, which goes before the epochs.
        names: The names of all these settings in the file.
    """
    settled = ("rounds",)
    passes = int(epochs) if epochs >= 1 and not epochs % 1 else 0  # 0 also for what is no number
    least = max_steps if max_steps and max_steps > 0 else passes
    if draft.users is not None and draft.users < least:
        reason = f"{draft.users} users cannot fill {least} rounds"
        return [refused(name, reason, *settled) for name in names]
    if max_steps and max_steps > 0:
        draft.put("rounds", max_steps)
        note = "a round is a step; users in a round follow from their number"
        return [taken(name, "rounds", note=note) for name in names]
    if not passes:
        return [
            refused(name, f"{epochs:g} passes: a user takes part in whole rounds", *settled)
            for name in names
        ]
    if draft.users is None:
        return [
            refused(
                name,
                "rounds follow from the number of users: give --users N, or rounds=T",
                *settled,
            )
            for name in names
        ]
    # A multiple of the passes, as random allocation has them, and no more rounds than users.
    rounds = passes * min(draft.users // passes, max(1, round(draft.users / batch)))
    draft.put("rounds", rounds)
    if passes > 1:
        draft.put("privacy.participations", passes)
    note = f"{draft.users} users, {passes} pass(es), about {batch} in a round on one device"
    return [taken(name, "rounds", "privacy.participations", note=note) for name in names]
