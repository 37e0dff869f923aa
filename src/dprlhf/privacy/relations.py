"""Choices that the command line offers, apart from the heavy modules that act on them."""

from __future__ import annotations

from typing import Literal

Adjacency = Literal["add-remove", "zero-out", "replace-one"]
"""How two neighbouring datasets differ: a user added or removed, a user's slot emptied, or a
user's data replaced by another's."""

Space = Literal["gradient", "prompt"]
"""Where an audit's canary users stand: in the gradients of a small bandit, which takes seconds, or
among the prompts of the recipe's own model."""
