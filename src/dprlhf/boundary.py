"""The boundary between private and released values, visible in the types.

Everything computed from users travels as :class:`Private` until the clipping code turns it into a
:class:`BoundedSum` and the gate (``privacy/gate.py``) turns that into :class:`Released`. Python
cannot enforce this alone: ``tests/test_boundary.py`` reads the syntax trees and pins which modules
may open a ``Private`` or build the other two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import torch

T = TypeVar("T")


class Private(Generic[T]):
    """A value computed from users that must not leave except through the gate.

    It refuses everything that would turn it into text, a number, a truth value or bytes, so that
    an accidental log line fails instead of leaking.

    >>> Private("a secret")
    Traceback (most recent call last):
    ...
    TypeError: a Private value refuses __repr__: it was computed from users
    """

    __slots__ = ("__value",)

    def __init__(self, value: T) -> None:
        self.__value = value

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
    """Open a private value. Only the modules pinned in ``tests/test_boundary.py`` may call this."""
    return value._Private__value  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True, repr=False, eq=False)
class BoundedSum:
    """A sum over users in which each user's contribution has L2 norm at most ``clip_norm``.

    Attributes:
        total: ``[dimension]``, float64 on the CPU.
        clip_norm: S, the bound on one user's contribution.
    """

    total: torch.Tensor
    clip_norm: float


@dataclass(frozen=True)
class Released(Generic[T]):
    """A value that went through the gate: charged to the ledger, noised, free to use."""

    value: T
    round: int
