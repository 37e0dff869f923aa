"""Privacy curves on both sides.

A curve is an upper bound on δ as a function of ε. The side ``remove`` compares the run with a user
to the run without it, ``add`` the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dprlhf.privacy.random_allocation import Side

SIDES: tuple[Side, Side] = ("remove", "add")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """Upper bounds on both sides' privacy curves, and their inverses."""

    delta: Callable[[float, Side, bool], float]  # of epsilon, side, rough
    epsilon: Callable[[float, Side], float]  # of delta, side
