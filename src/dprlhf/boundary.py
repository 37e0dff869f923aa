"""The boundary between private and released values, visible in the types.

Everything computed from users travels as :class:`Private` until the clipping code turns it into a
:class:`BoundedSum` and the gate (``privacy/gate.py``) turns that into :class:`Released`. Only a
``Released`` value may move a model or be written down: the functions that do so take nothing else.
Python cannot enforce this alone: ``tests/test_boundary.py`` reads the syntax trees and pins which
modules may open a ``Private``, build the other two, or read a ``Released``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, overload

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
V = TypeVar("V")
W = TypeVar("W")
R = TypeVar("R")


class Private(Generic[T_co]):
    """A value computed from users that must not leave except through the gate.

    It refuses everything that would turn it into text, a number, a truth value or bytes, so that
    an accidental log line fails instead of leaking. :meth:`map` computes with it, and what comes
    out is private again.

    >>> Private("a secret")
    Traceback (most recent call last):
    ...
    TypeError: a Private value refuses __repr__: it was computed from users
    """

    __slots__ = ("__value",)

    def __init__(self, value: T_co) -> None:
        self.__value = value

    @overload
    def map(self, f: Callable[[T_co], R]) -> Private[R]: ...
    @overload
    def map(self, f: Callable[[T_co, U], R], second: Private[U], /) -> Private[R]: ...
    @overload
    def map(
        self, f: Callable[[T_co, U, V], R], second: Private[U], third: Private[V], /
    ) -> Private[R]: ...
    @overload
    def map(
        self,
        f: Callable[[T_co, U, V, W], R],
        second: Private[U],
        third: Private[V],
        fourth: Private[W],
        /,
    ) -> Private[R]: ...
    def map(self, f: Callable[..., Any], *others: Private[Any]) -> Private[Any]:
        """Return f(value, other values), which stays private.

        It is for pure functions: ``f`` returns what it computed and does nothing else with its
        arguments. A function that writes, prints, logs or keeps any of them elsewhere opens the
        private value, and belongs in a module that ``tests/test_boundary.py`` allows to call
        :func:`open_private`.

        Args:
            f: A pure function of the values.
            *others: Further private values, passed to ``f`` after this one.

        >>> doubled = Private(2).map(lambda number, factor: factor * number, Private(10))
        >>> open_private(doubled)
        20
        """
        return Private(f(self.__value, *(open_private(other) for other in others)))

    def _refuse(self, operation: str) -> NoReturn:
        raise TypeError(f"a Private value refuses {operation}: it was computed from users")

    def __repr__(self) -> str:
        self._refuse("__repr__")

    def __str__(self) -> str:
        self._refuse("__str__")

    def __format__(self, spec: str) -> str:
        self._refuse("__format__")

    def __len__(self) -> int:
        self._refuse("__len__")

    def __bool__(self) -> bool:
        self._refuse("__bool__")

    def __iter__(self) -> Any:
        self._refuse("__iter__")

    def __eq__(self, other: object) -> bool:
        self._refuse("__eq__")

    def __hash__(self) -> int:
        self._refuse("__hash__")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("pickling")


def open_private(value: Private[T]) -> T:
    """Return what a private value holds.

    Only the modules pinned in ``tests/test_boundary.py`` may call this. All others compute with
    :meth:`Private.map`.
    """
    return value._Private__value  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True, repr=False, eq=False)
class BoundedSum:
    """A sum over users in which each user's contribution has L2 norm at most ``clip_norm``.

    Attributes:
        total: The sum, ``[dimension]``, float64 on the CPU.
        clip_norm: S, the L2 bound on one user's contribution.
    """

    total: torch.Tensor
    clip_norm: float


@dataclass(frozen=True, repr=False, eq=False)
class Released(Generic[T]):
    """A value that went through the gate: charged to the ledger, noised, free to use.

    Differential privacy is closed under post-processing, so a function of a released value (and of
    public ones) is released too. The wrapper stays on all the way to the optimizer, so that a sum
    over users which did not go through the gate cannot be passed where a released one belongs.

    Attributes:
        t: The round, from 1, in whose charge the value is included.
    """

    _value: T
    t: int

    def map(self, f: Callable[[T], U]) -> Released[U]:
        """Return f(value), still released. ``f`` may use public and released values only."""
        return Released(f(self._value), self.t)

    def split(self: Released[torch.Tensor], sizes: Sequence[int]) -> list[Released[torch.Tensor]]:
        """Cut a released vector into consecutive pieces of these lengths."""
        pieces = torch.split(self._value, list(sizes))
        return [Released(piece, self.t) for piece in pieces]


def open_released(value: Released[T], where: str) -> T:
    """Return the number or tensor inside a released value.

    Only the modules pinned in ``tests/test_boundary.py`` may call this: the optimizer step, and
    what writes released numbers to metrics. All others use :meth:`Released.map`.

    Args:
        value: What the gate returned, or a function of it.
        where: Who asks, for the error message.

    Raises:
        TypeError: The value is not :class:`Released`, for example a sum that skipped the gate.
    """
    check_released(value, where)
    return value._value


def check_bounded(value: object, where: str) -> None:
    """Refuse what the clipping code did not make.

    Raises:
        TypeError: The value is not :class:`BoundedSum`.
    """
    if not isinstance(value, BoundedSum):
        raise TypeError(
            f"{where} takes a BoundedSum, which only the clipping code makes, not"
            f" {type(value).__name__}"
        )


def check_released(value: object, where: str) -> None:
    """Refuse what the gate did not make.

    Raises:
        TypeError: The value is not :class:`Released`.
    """
    if not isinstance(value, Released):
        raise TypeError(
            f"{where} takes a Released value, which only the gate makes, not"
            f" {type(value).__name__}: a sum over users goes through the gate first"
        )


Read = Callable[[Released[torch.Tensor]], torch.Tensor]
"""Gives the tensor in a released value to a computation inside :func:`post_process`."""


def restored(value: T, t: int) -> Released[T]:
    """Return what was computed from a release of round t that a checkpoint kept, as released.

    Only the modules pinned in ``tests/test_boundary.py`` may call it.
    """
    return Released(value, t)


def post_process(compute: Callable[[Read], T]) -> Released[T]:
    """Run a computation whose every input is public or released, and return its result as released.

    This is :meth:`Released.map` for a computation that asks for one release after another, each
    depending on the ones before, as an iterative solver does. Only the modules pinned in
    ``tests/test_boundary.py`` may call it.

    Args:
        compute: Gets a function that opens released values. Everything it learns about users must
            come through that function.

    Raises:
        TypeError: The computation read a value that is not :class:`Released`, or none at all.
    """
    rounds: list[int] = []

    def read(value: Released[torch.Tensor]) -> torch.Tensor:
        opened = open_released(value, "post_process")
        rounds.append(value.t)
        return opened

    result = compute(read)
    if not rounds:
        raise TypeError("post_process: the computation read no Released value")
    return Released(result, rounds[-1])
