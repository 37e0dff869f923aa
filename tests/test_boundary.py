"""Who may open what: the boundary types refuse, and the syntax trees show who gets round them."""

import ast
import copy
import functools
import io
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch

from dprlhf.boundary import BoundedSum, Private, Released, open_private
from helpers import house

CANARY = "my private prompt"

REFUSED: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "repr": repr,
    "f-string": lambda p: f"{p}",
    "format": lambda p: format(p, ">10"),
    "percent": lambda p: "%s" % p,  # noqa: UP031
    "ascii": ascii,
    "inside a list": lambda p: repr([p]),
    "len": len,
    "bool": bool,
    "not": lambda p: not p,
    "iter": iter,
    "list": list,
    "in": lambda p: "my" in p,
    "star": lambda p: [*p],
    "eq": lambda p: p == CANARY,
    "eq reflected": lambda p: CANARY == p,  # noqa: SIM300
    "ne": lambda p: p != CANARY,
    "hash": hash,
    "set": lambda p: {p},
    "dict key": lambda p: {p: 1},
    "order": lambda p: p < CANARY,
    "int": int,
    "float": float,
    "index": lambda p: p[0],
    "add": lambda p: p + "x",
    "pickle": pickle.dumps,
    "pickle 0": lambda p: pickle.dumps(p, protocol=0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "json": json.dumps,
    "json key": lambda p: json.dumps([1, {"a": p}]),
    "vars": vars,
    "tensor": torch.as_tensor,
    "set attribute": lambda p: setattr(p, "other", 1),
}


BY_PYTHON = {
    "in", "order", "int", "float", "index", "add", "vars", "tensor", "set attribute", "json",
    "json key", "pickle 0",
}  # fmt: skip
"""Refused because the class has no such operation."""


@pytest.mark.parametrize("operation", REFUSED)
def test_private_refuses(operation: str) -> None:
    with pytest.raises((TypeError, AttributeError, RuntimeError)) as caught:
        REFUSED[operation](Private(CANARY))
    assert CANARY not in str(caught.value)
    if operation not in BY_PYTHON:
        assert "Private value refuses" in str(caught.value)


@dataclass(frozen=True)
class Holder:
    value: Private[str]


def test_private_says_nothing_inside_a_dataclass() -> None:
    for action in (repr, asdict, pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="Private value refuses"):
            action(Holder(Private(CANARY)))


def test_private_says_nothing_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.Logger("apart")
    logger.addHandler(handler)
    logger.warning("prompt %s", Private(CANARY))
    logger.warning("prompt %s", CANARY)  # the control
    shown = stream.getvalue() + capsys.readouterr().err
    assert shown.count(CANARY) == 1
    assert "Private value refuses" in shown


def test_map_keeps_what_it_computes_private() -> None:
    """Of up to four private values, in their order; what f raises comes out, nothing else does."""
    a, b = Private(CANARY), Private(3)
    both = a.map(lambda text, n: text * n, b)
    assert isinstance(both, Private)
    assert open_private(both) == CANARY * 3
    four = b.map(lambda *given: given, Private(4), Private(5), Private(6))
    assert open_private(four) == (3, 4, 5, 6)
    with pytest.raises(TypeError, match="Private value refuses"):
        str(both)


def test_open_private_returns_the_very_value() -> None:
    value = ["anything"]
    assert open_private(Private(value)) is value


def test_a_bounded_sum_does_not_show_its_total() -> None:
    total = torch.tensor([0.123456], dtype=torch.float64)
    shown = BoundedSum(total, 1.0)
    assert "0.1234" not in repr(shown) + str(shown) + f"{shown}"
    with pytest.raises(TypeError):
        json.dumps(shown)


def test_boundary_types_are_frozen() -> None:
    bounded, released = BoundedSum(torch.zeros(1), 1.0), Released(1.0, 1)
    with pytest.raises(AttributeError):
        bounded.clip_norm = 100.0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        released.t = 2  # type: ignore[misc]


# Who may do what. A new entry needs the same thought as a change of the privacy proof.
ALLOWED: dict[str, dict[str, str]] = {
    "open_private": {
        "audit/canaries": "the users are canaries; tells the attack their rounds where epsilon"
        " holds against those who know them",
        "gradients/clipping": "clips each user and sums",
        "runs/budget": "hashes the users' names under the budget book's key",
        "runs/opening": "compares the users with those that the run, or an earlier one, had",
        "training/progress": "shows a share of a round, on a terminal only",
        "updates/public_gradients": "the users are public prompts, which it wrapped itself",
        "rewards/scoring": "hands each user's responses to the rewards",
        "training/rounds": "hands each process its users of a round, and writes secret/ telemetry",
    },
    "open_released": {
        "policies/optimizers": "moves the model",
        "training/rounds": "writes the norm of what was released to the metrics",
        "updates/telemetry": "reads the noised mean reward",
        "audit/watched_gate": "shows the auditor what was released of its canaries",
        "papers/control/updates": "keeps the noised mean return for later rounds",
        "papers/control/bandits": "moves the bandit's policy",
    },
    "post_process": {"updates/regression": "runs an oracle that learns of users what was released"},
    "restored": {"training/linear_reward": "takes the release that its checkpoint kept"},
    "BoundedSum": {"gradients/clipping": "the only place that bounds a user's influence"},
    "Released": {"privacy/gate": "the only exit"},
    "rounded_gaussian": {
        "privacy/gate": "noise is drawn once for each charge",
        "papers/regression/in_memory": "an oracle run by itself, without a ledger: its"
        " result states its cost",
    },
    "charge": {"privacy/gate": "noise follows the charge in the same function"},
    "_Private__value": {"boundary": "open_private is the only way in"},
    "_value": {},
}

WHY = {
    "open_private": "opens values computed from users; everything it returns must stay Private or"
    " go through the gate",
    "BoundedSum": "claims that every user's contribution was clipped; the noise rests on it",
    "Released": "claims that a value was charged and noised",
    "rounded_gaussian": "draws privacy noise; drawn outside the gate, it can be used twice or"
    " without a charge",
    "charge": "spends a round's users; whatever charges must also be what releases",
    "_Private__value": "opens a Private behind the back of open_private",
    "open_released": "takes a released value out of its type; what moves a model or is written down"
    " must be checked to be one",
    "post_process": "claims that a computation learned of users what was released, and no more",
    "restored": "claims that a value was released before it was saved",
    "_value": "opens a Released behind the back of open_released",
}

DEFINED_IN = {
    "open_private": "boundary", "BoundedSum": "boundary", "Released": "boundary",
    "rounded_gaussian": "privacy/rounded_gaussian",
    "charge": "privacy/ledger", "_Private__value": "", "open_released": "boundary",
    "post_process": "boundary", "restored": "boundary", "_value": "boundary",
}  # fmt: skip

TYPES = {"BoundedSum", "Released"}
"""These may be imported and named in annotations everywhere; what counts is a use as a value."""


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Name("annotation", ast.Load())
        return self.generic_visit(node)


def uses(source: str) -> Iterator[str]:
    """Yield the guarded names that a module uses, however it spells them."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                if name.name in WHY:
                    aliases[name.asname or name.name] = name.name
                    if name.name not in TYPES:
                        yield name.name
                if name.name == "*" and (node.module or "").startswith("dprlhf"):
                    yield from WHY
    for node in ast.walk(_WithoutAnnotations().visit(tree)):
        match node:
            case ast.Name(id=name) if name in WHY or name in aliases:
                yield aliases.get(name, name)
            case ast.Attribute(attr=name) if name in WHY:
                yield name
            case ast.Attribute(attr=name) if name.startswith("__") and name.endswith("value"):
                yield "_Private__value"  # name mangling inside another class called Private
            case ast.Constant(value=str(name)) if name in WHY:  # getattr(x, "…")
                yield name
            case ast.Attribute(attr="replace", value=ast.Name(id="dataclasses")):
                yield from TYPES  # dataclasses.replace builds another of the same kind
            case ast.ImportFrom(module="dataclasses", names=names) if any(
                n.name == "replace" for n in names
            ):
                yield from TYPES


@functools.cache
def modules() -> dict[str, frozenset[str]]:
    """Return the guarded names that each module uses, of the package and of the papers' tables."""
    return {
        path.relative_to(root).with_suffix("").as_posix(): frozenset(uses(path.read_text()))
        for root, folder in ((house.SOURCE, "."), (house.ROOT, "papers"))
        for path in sorted((root / folder).rglob("*.py"))
    }


def test_at_most_ten_modules_open_a_private_value() -> None:
    assert len(ALLOWED["open_private"]) <= 10


@pytest.mark.parametrize("name", ALLOWED)
def test_only_the_pinned_modules(name: str) -> None:
    found = {
        module for module, used in modules().items() if module != DEFINED_IN[name] and name in used
    }
    added, gone = found - ALLOWED[name].keys(), ALLOWED[name].keys() - found
    assert not added, (
        f"{', '.join(sorted(added))} uses {name}, which {WHY[name]}. If this is meant, review it"
        " against the privacy model and add it to ALLOWED with its reason"
    )
    assert not gone, f"{', '.join(sorted(gone))} no longer uses {name}: take it out of ALLOWED"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("open_private", "from dprlhf.boundary import open_private"),
        ("open_private", "from dprlhf.boundary import open_private as peek"),
        ("open_private", "from dprlhf import boundary\nboundary.open_private(x)"),
        ("open_private", "import dprlhf.boundary as b\ngetattr(b, 'open_private')(x)"),
        ("open_private", "from dprlhf.boundary import *"),
        ("BoundedSum", "from dprlhf.boundary import BoundedSum\nx = BoundedSum(t, 1.0)"),
        ("BoundedSum", "from dprlhf.boundary import BoundedSum as B\nx = B(t, 1.0)"),
        ("BoundedSum", "from dprlhf.boundary import BoundedSum\nmake = BoundedSum"),
        ("BoundedSum", "from dprlhf import boundary\nboundary.BoundedSum(t, 1.0)"),
        ("BoundedSum", "import dataclasses\ndataclasses.replace(bounded, clip_norm=9)"),
        ("BoundedSum", "from dataclasses import replace"),
        ("Released", "from dprlhf.boundary import Released\nReleased[int](1, 1)"),
        ("Released", "from dprlhf.boundary import Released\nf(Released)"),
        (
            "rounded_gaussian",
            "from dprlhf.privacy import rounded_gaussian as r\nr.rounded_gaussian(k)",
        ),
        ("charge", "def f(run):\n    run.ledger.charge(1)"),
        ("charge", "spend = ledger.charge"),
        ("open_released", "from dprlhf.boundary import open_released as look"),
        ("post_process", "from dprlhf import boundary\nboundary.post_process(f)"),
        ("restored", "from dprlhf.boundary import restored\nrestored(x, 1)"),
        ("_value", "released._value"),
        ("_value", "getattr(released, '_value')"),
        ("_Private__value", "x._Private__value"),
        ("_Private__value", "object.__getattribute__(x, '_Private__value')"),
        ("_Private__value", "class Private:\n    def f(self, x):\n        return x.__value"),
    ],
)
def test_the_scan_sees_every_spelling(name: str, source: str) -> None:
    assert name in set(uses(source))


@pytest.mark.parametrize(
    "source",
    [
        "from dprlhf.boundary import BoundedSum, Released, Private",
        "from dprlhf.boundary import Released\ndef f(x: Released[int]) -> Released[int]: ...",
        "from dprlhf.boundary import BoundedSum\nclass A:\n    total: BoundedSum",
        "from dprlhf.boundary import Private\nx: Private[int] = Private(1)",
        '"""Nobody calls open_private here."""',
        "text.replace('a', 'b')",
    ],
)
def test_the_scan_leaves_annotations_and_prose_alone(source: str) -> None:
    assert not set(uses(source))
