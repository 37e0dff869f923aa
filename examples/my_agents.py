"""A tool and an environment for an agent: a calculator, and a game of guessing a number.

    tools=[calculate]               or  rollout.agent.tools: [examples/my_agents.py:calculate]
    environment_factory=NumberGame  or  rollout.agent.environment: examples/my_agents.py:NumberGame

Neither keeps anything from call to call outside of its own environment: one user's calls must not
change what another user's calls answer.
"""

from __future__ import annotations

import operator
import random
from typing import Any

_OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


def calculate(left: float, sign: str, right: float) -> float:
    """Calculate with two numbers.

    Args:
        left: The first number.
        sign: One of + - * /.
        right: The second number.

    Returns:
        The result.
    """
    return float(_OPERATIONS[sign](left, right))


class NumberGame:
    """Guess a number from 1 to ``highest``, a column of the prompt's row."""

    def __init__(self) -> None:
        self._number = 0
        self._guesses = 0
        self._found = False

    def reset(self, highest: int = 10, **row: Any) -> str:
        """Think of a number; the text is appended to the prompt."""
        self._number = random.randint(1, highest)
        return f"\nI think of a number from 1 to {highest}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            Whether it is the number, or else whether the number is larger or smaller.
        """
        self._guesses += 1
        self._found = self._found or number == self._number
        if number == self._number:
            return "Right."
        return "Larger." if number < self._number else "Smaller."

    def get_reward(self) -> float:
        """Return 1 for the number at the first guess, less for each further one, 0 without it."""
        return 1.0 / self._guesses if self._found else 0.0
