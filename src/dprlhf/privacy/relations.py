"""Choices that the command line offers, apart from the heavy modules that act on them."""

from __future__ import annotations

from typing import Literal, get_args

from dprlhf.errors import DprlhfError

Adjacency = Literal["add-remove", "zero-out", "replace-one"]
"""How two neighbouring datasets differ: a user added or removed, a user's slot emptied, or a
user's data replaced by another's."""

DEFAULT_ADJACENCY: Adjacency = "zero-out"
"""The relation that a guarantee is stated for unless another one is asked for.

The number of users N is published, so it must be the same for both neighbours: a user's slot is
emptied, and the user still counts in N and in the divisor kN/T. Where neighbours differ in N
(add-remove), what is published tells them apart with certainty, whatever the noise.
"""


def check_adjacency(adjacency: str) -> None:
    """Refuse a word that names no neighbouring relation, and so no sensitivity either."""
    if adjacency not in get_args(Adjacency):
        raise DprlhfError(
            f"adjacency {adjacency!r} is unknown: use one of {', '.join(get_args(Adjacency))}"
        )


Space = Literal["gradient", "prompt"]
"""Where an audit's canary users stand: in the gradients of a small bandit, which takes seconds, or
among the prompts of the recipe's own model."""
