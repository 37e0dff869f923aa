"""What a fuzzer throws at recipes, plans, data, ledgers and runs, and what must hold.

Each target is a strategy and a check. A check accepts a clear :class:`DprlhfError` or a correct
result, and nothing else: no other exception of our code, no changed guarantee.
``test_fuzz.py`` runs some hundred cases of each, ``scripts/fuzz.py`` any number.
"""

import contextlib
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
import yaml
from hypothesis import strategies as st

from dprlhf.boundary import open_private
from dprlhf.data.given_rows import rows_from
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Adjacency, Mechanism, Partition, epsilon
from dprlhf.privacy.gaussian import gaussian_delta
from dprlhf.privacy.ledger import Ledger, read_ledger
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.recipe import Data, Recipe, dump_recipe, known_keys, make_recipe
from dprlhf.runs.card import guarantee_sentence, model_card, privacy_card
from dprlhf.runs.earlier import Earlier
from dprlhf.training.build import plan_of

MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
KEY = bytes(range(32))


@contextlib.contextmanager
def refusal() -> Iterator[list[DprlhfError]]:
    """Let a clear error pass, and keep it."""
    found: list[DprlhfError] = []
    try:
        yield found
    except DprlhfError as error:
        text = str(error)
        assert text.strip()
        assert "Traceback" not in text
        found.append(error)


TEXT = st.text(st.characters(exclude_categories=()), max_size=12)  # surrogates and all
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 0.5, 1.0, 4.0, 8.0, 1e-5, 1e-3, 1e-300, 5e-324, 1e6, 1e308]),
    st.floats(),
    st.integers(-3, 300),
    st.integers(),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT, st.dates(), st.binary(max_size=5))
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def check_guarantee(plan: Plan, target: float | None, stated: dict[str, Any]) -> None:
    """Recompute ε from the stated numbers alone: it is what is stated, and at most the target."""
    json.dumps(stated, allow_nan=False)
    if not plan.private:
        assert stated["epsilon"] == "infinity"
        return
    cost = epsilon(
        Mechanism(
            stated["noise_multiplier"], stated["rounds"], stated["partition"], stated["adjacency"],
            stated["participations"], stated["releases_per_round"], stated["bands"],
        ),
        stated["delta"],
    )  # fmt: skip
    assert cost.epsilon <= stated["epsilon"]
    assert target is None or stated["epsilon"] <= target
    assert stated["epsilon_lower"] <= stated["epsilon"]
    if stated["partition"] in ("fixed", "stream"):
        z = stated["noise_multiplier"] / math.sqrt(stated["releases_per_round"])
        z /= 2 if stated["adjacency"] == "replace-one" else 1
        assert gaussian_delta(z, stated["epsilon"]) <= stated["delta"] * (1 + 1e-9)
    assert math.isfinite(plan.noise_std)
    assert plan.noise_std > 0
    assert plan.expected_batch_size > 0


# Random allocation and Poisson sampling take long to account for where rounds are many.
SMALL = st.sampled_from([1, 2, 3, 4, 8])
PLANS = st.fixed_dictionaries(
    {
        "users": st.one_of(st.integers(-2, 50), st.integers(0, 10**12)),
        "rounds": st.one_of(SMALL, st.integers(-2, 60)),
        "delta": st.one_of(st.sampled_from([1e-5, 1e-3, 1e-9, 0.5]), st.floats()),
        "partition": st.sampled_from(["fixed", "stream"] * 4 + list(get_args(Partition)) + ["all"]),
    },
    optional={
        "epsilon": st.one_of(st.sampled_from([1.0, 4.0, 8.0, math.inf]), NUMBERS),
        "noise_multiplier": st.one_of(st.sampled_from([0.0, 0.5, 1.0, 3.0]), NUMBERS),
        "clip_norm": NUMBERS,
        "adjacency": st.sampled_from([*get_args(Adjacency), None, "none"]),
        "participations": st.one_of(st.sampled_from([1, 2]), st.integers(-1, 5)),
        "releases_per_round": st.one_of(SMALL, st.integers(-1, 10**6)),
        "bands": st.integers(-1, 5),
    },
)


def check_plan(asked: dict[str, Any]) -> None:
    with refusal():
        plan = make_plan(**asked)
        target = asked.get("epsilon")
        check_guarantee(plan, target, json.loads(json.dumps(plan.terms(), allow_nan=False)))
        if plan.users <= 1000:
            check_allocation(plan)


def check_allocation(plan: Plan) -> None:
    """Nobody takes part more often than is paid for, and the rounds are those of the plan."""
    drawn = open_private(allocate(plan, KEY))
    rounds = [drawn.round(t) for t in range(1, plan.rounds + 1)]
    assert all(len(set(users.tolist())) == len(users) for users in rounds)
    times = np.bincount(np.concatenate(rounds), minlength=plan.users)
    assert len(times) == plan.users
    if plan.partition == "random-allocation":
        assert (times == plan.participations).all()
    elif plan.partition != "poisson":
        assert times.max() <= 1
        assert all(len(users) == plan.expected_batch_size for users in rounds)


VALID: dict[str, Any] = {
    "policy": {"model_name_or_path": "model"},
    "data": {"path": "prompts.csv"},
    "rewards": [{"function": "mine:reward"}],
    "privacy": {"epsilon": 4.0, "partition": "fixed"},
    "rounds": 4,
}
KEYS = sorted(set(known_keys(Recipe)))
NAMES = [
    *get_args(Partition), *get_args(Adjacency), "pg", "grpo", "ppo", "rebel", "npg", "sgd", "adam",
    "normalized-sgd", "lora", "peft", "loo", "group", "paired", "kl", "l2",
    "gauss-newton", "gradient", "token", "reference", "bfloat16", "projected-sgd",
    "sufficient-statistics", "in-memory", "wandb", "linear", ".inf", "none",
]  # fmt: skip
VALUES = st.one_of(st.sampled_from(NAMES), NUMBERS, JUNK, st.just({"rank": 2}))
EDITS = st.lists(
    st.tuples(st.one_of(st.sampled_from(KEYS), TEXT), VALUES, st.booleans()), max_size=5
)


def edited(edits: list[tuple[str, Any, bool]]) -> Any:
    """Return a valid recipe with some keys set, or taken out."""
    values = json.loads(json.dumps(VALID))
    for path, value, kept in edits:
        node: Any = values
        *parents, last = path.split(".")
        for parent in parents:
            if isinstance(node, dict):
                node = node.setdefault(parent, {})
            if isinstance(node, list):
                node = node[0] if node else {}
        if isinstance(node, dict):
            node[last] = value
            if not kept:
                node.pop(last)
    return values


RECIPES = st.tuples(EDITS, st.integers(0, 10**6))


def check_recipe(case: tuple[list[tuple[str, Any, bool]], int]) -> None:
    edits, users = case
    values = edited(edits)
    with refusal():
        check_accepted(make_recipe(values), users)


def check_accepted(recipe: Recipe, users: int) -> None:
    """A recipe that is accepted survives YAML, and promises what its plan keeps."""
    assert make_recipe(yaml.safe_load(dump_recipe(recipe))) == recipe
    privacy = recipe.privacy
    if recipe.rounds > 64 and privacy.partition in ("random-allocation", "poisson"):
        return  # accounted for all the same, but in seconds
    plan = plan_of(recipe, SimpleNamespace(count=users))  # type: ignore[arg-type]
    made = privacy_card(recipe, plan, 100, KEY, Earlier())
    card = json.loads(json.dumps(made, allow_nan=False))
    assert card["releases_per_round"] == recipe.update.releases
    assert card["rounds"] == recipe.rounds
    assert card["noise_multiplier"] == plan.noise_multiplier
    check_guarantee(plan, privacy.epsilon, card)
    sentence = guarantee_sentence(card)
    assert sentence in model_card(recipe, card)
    if plan.private:
        said = float(re.match(r"\(([^,]+),", sentence).group(1))  # type: ignore[union-attr]
        assert said >= card["epsilon"]
    else:
        assert "No privacy" in sentence


MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", ""]), "content": TEXT}),
    max_size=2,
)
CELLS = {
    "text": TEXT, "number": NUMBERS, "messages": MESSAGES, "junk": JUNK,
    "user": st.sampled_from(["a", "b", "c"]), "code": st.integers(0, 4),
    "sometimes": st.sampled_from(["a", None, "b", math.nan]),
}  # fmt: skip


@st.composite
def tables(draw: Any) -> Any:
    """Draw prompts as a program may hold them: texts, conversations, rows, or anything."""
    kind = draw(st.sampled_from(["rows", "rows", "rows", "list", "junk"]))
    if kind == "junk":
        return draw(JUNK)
    if kind == "list":
        return draw(st.lists(CELLS[draw(st.sampled_from(sorted(CELLS)))], max_size=12))
    columns = {"prompt": draw(st.sampled_from(sorted(CELLS)))}
    for name in draw(st.lists(st.sampled_from(["who", "note", "x"]), unique=True, max_size=3)):
        columns[name] = draw(st.sampled_from(sorted(CELLS)))
    row = st.fixed_dictionaries({name: CELLS[kind] for name, kind in columns.items()})
    return draw(st.lists(row, max_size=12))


DATA = st.tuples(
    tables(),
    st.fixed_dictionaries(
        {},
        optional={
            "user_column": st.sampled_from(["who", "who", "note", "prompt", "nobody"]),
            "max_prompts_per_user": st.integers(1, 4),
            "prompt_words": st.integers(1, 3),
        },
    ),
    st.integers(1, 4),
)


def check_data(case: tuple[Any, dict[str, Any], int]) -> None:
    given, settings, rounds = case
    spec = Data(path="in-memory", **settings)
    with refusal():
        users = Users(rows_from(given, spec.prompt_column), spec)
        check_users(users, spec, rounds)


def check_users(users: Users, spec: Data, rounds: int) -> None:
    plan = make_plan(
        users=users.count, rounds=rounds, delta=1e-5, noise_multiplier=1.0, partition="fixed"
    )
    check_allocation(plan)
    open_private(users.digest())
    everybody = users.select(np.arange(users.count))
    taken = np.bincount(everybody.users, minlength=users.count)
    assert taken.min() >= 1
    assert taken.max() <= spec.max_prompts_per_user
    assert all(isinstance(p, str | list) for p in everybody.prompts)
    for user in range(users.count):  # whoever else is there
        alone = users.select(np.array([user]))
        mine = np.flatnonzero(everybody.users == user)
        assert repr(alone.prompts) == repr([everybody.prompts[i] for i in mine])
        assert alone.slots.tolist() == list(range(len(mine)))


class Odd:
    """Raises in whatever it is asked."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __str__(self) -> str:
        raise RuntimeError("no text")


class OddList:
    def tolist(self) -> Any:
        raise RuntimeError("no list")


ANSWERS = st.one_of(
    st.floats(-5, 5),
    st.floats(-5, 5),
    st.none(),
    NUMBERS,
    JUNK,
    st.sampled_from(
        [10**400, Decimal("NaN"), Decimal("1.5"), Fraction(1, 3), 1j, Odd(), OddList()]
    ),
    st.sampled_from([np.float16(2), np.float32("nan"), np.int8(3), torch.tensor(1.5)]),
    st.sampled_from([torch.zeros(2), np.zeros((1, 1)), object(), float, lambda: 1]),
)


@functools.cache
def a_ledger() -> tuple[bytes, dict[str, Any]]:
    plan = make_plan(users=9, rounds=4, delta=1e-5, noise_multiplier=1.0, partition="fixed")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "ledger.jsonl"
        ledger = Ledger(path, plan.terms())
        for t in (1, 2, 3):
            ledger.charge(t, noise_multiplier=1.0, clip_norm=1.0)
            ledger.commit(t)
        ledger.close()
        return path.read_bytes(), plan.terms()


DAMAGE = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 10**4), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.integers(0, 10**4), st.integers(0, 300)),
        st.tuples(st.just("insert"), st.integers(0, 10**4), st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("drop line"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("copy line"), st.integers(0, 8), st.integers(0, 8)),
        st.tuples(st.just("end"), st.integers(0, 10**4), st.just(0)),
    ),
    min_size=1,
    max_size=3,
)


def damaged(content: bytes, damage: list[tuple[str, int, Any]]) -> bytes:
    for kind, place, what in damage:
        at = place % (len(content) + 1)
        lines = content.splitlines(keepends=True)
        if kind == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ what]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at] + content[at + what :]
        elif kind == "insert":
            content = content[:at] + what + content[at:]
        elif kind == "end":
            content = content[:at]
        elif kind == "drop line" and lines:
            lines.pop(place % len(lines))
            content = b"".join(lines)
        elif kind == "copy line" and lines:
            lines.insert(what % len(lines), lines[place % len(lines)])
            content = b"".join(lines)
    return content


def check_ledger(damage: list[tuple[str, int, Any]]) -> None:
    """A damaged ledger is refused, or is a whole beginning of the true one."""
    whole, terms = a_ledger()
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, refusal():
        path = Path(folder) / "ledger.jsonl"
        path.write_bytes(whole)
        true = read_ledger(path)
        path.write_bytes(damaged(whole, damage))
        ledger = Ledger(path, terms)
        held = list(ledger.entries)
        ledger.close()
        assert held == true[: len(held)] or len(held) == 1  # an emptied one starts anew
        assert held[0].body == json.loads(json.dumps(terms))


RUNS = st.fixed_dictionaries(
    {
        "prompts": st.one_of(
            st.lists(TEXT.filter(lambda t: t.isprintable()), min_size=4, max_size=8),
            st.lists(TEXT, min_size=4, max_size=8),
            st.lists(MESSAGES, min_size=2, max_size=6),
            tables(),
        ),
        "answers": st.one_of(
            st.lists(st.floats(-5, 5), min_size=1, max_size=4),
            st.lists(st.floats(-5, 5), min_size=1, max_size=4),
            st.lists(ANSWERS, min_size=1, max_size=4),
        ),
        "update": st.sampled_from(["pg", "grpo", "ppo", "rebel", "npg"]),
        "privacy__partition": st.sampled_from(["fixed", "stream", "random-allocation"]),
        "rollout__base_policy": st.sampled_from(["on-policy", "reference"]),
        "rollout__responses": st.sampled_from([2, 3, 4]),
        "rounds": st.integers(1, 3),
        "epsilon": st.sampled_from([1.0, 8.0, math.inf]),
        "kl__beta": st.sampled_from([0.0, 0.1, 1e30]),
        "learning_rate": st.sampled_from([1e-3, 1.0, 1e30]),
        "update__clip_norm": st.sampled_from([1e-30, 1.0, 1e30]),
    }
)


def check_run(case: dict[str, Any]) -> None:
    """A whole run ends, or stops with a clear error; what it promises is what its files say."""
    import dprlhf
    from helpers import tiny

    values = dict(case)
    answers, update = values.pop("answers"), values.pop("update")

    def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
        return [answers[len(str(c)) % len(answers)] for c in completions]

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, refusal() as refused:
        model = os.environ.get("FUZZ_MODEL") or str(tiny.save(Path(folder) / "model"))
        dprlhf.train(
            model=model,
            reward=reward,
            update__name=update,
            rollout__max_new_tokens=2,
            rollout__batch_size=4,
            update__batch_size=4,
            policy__adapter={
                "type": "ffa-lora", "rank": 1, "layers": [1], "target_modules": ["c_attn"],
            },
            output_dir=Path(folder) / "run",
            quiet=True,
            **values,
        )  # fmt: skip
        global ended
        ended += 1
        assert not refused
        card = json.loads((Path(folder) / "run/privacy.json").read_text())
        entries = read_ledger(Path(folder) / "run/ledger.jsonl")
        charged = [e.body["round"] for e in entries if e.kind == "charge"]
        assert charged == list(range(1, values["rounds"] + 1))
        if math.isfinite(values["epsilon"]):
            cost = epsilon(
                Mechanism(
                    card["noise_multiplier"], card["rounds"], card["partition"], card["adjacency"],
                    card["participations"], card["releases_per_round"], card["bands"],
                ),
                card["delta"],
            )  # fmt: skip
            assert cost.epsilon <= card["epsilon"] <= values["epsilon"]


TARGETS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None], int]] = {
    "recipe": (RECIPES, check_recipe, 200),
    "plan": (PLANS, check_plan, 100),
    "data": (DATA, check_data, 100),
    "ledger": (DAMAGE, check_ledger, 130),
    "run": (RUNS, check_run, 8),
}
"""Strategy, check, and the cases that the suite runs."""

ended = 0
"""Whole runs that were not refused."""
