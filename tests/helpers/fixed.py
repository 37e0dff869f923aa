"""The same random numbers in every run of a process: for tests that compare runs bit for bit."""

from __future__ import annotations

from fractions import Fraction

import dprlhf.privacy.ledger
import dprlhf.runs.folder
from dprlhf.privacy.rounded_gaussian import rounded_gaussian

KEY = bytes(range(32))
NONCE = "a test"


def fix_randomness() -> None:
    """Give new runs of this process one key, and all charges one nonce.

    For processes of their own; in the tests' own process ``conftest.py`` does the like.
    """
    dprlhf.runs.folder.new_key = lambda: KEY
    dprlhf.privacy.ledger.new_nonce = lambda: NONCE


def make_tables() -> None:
    """Compute the tables of the gate's noise, 0.2 s, before a process forks many times."""
    rounded_gaussian(KEY, "tables", std=Fraction(1), count=1)
