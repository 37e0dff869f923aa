"""The same random numbers in every run of a process: for tests that compare runs bit for bit."""

import os
from fractions import Fraction

import torch

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


def prepare_to_fork() -> None:
    """Do once what each fork of this process would do: the tables of the gate's noise take 0.2 s.

    Torch has one thread, in every fork, too: there its pool of threads is made anew at the first
    call, and where two threads make that call at once (the main one and autograd's own), torch may
    end the process ("Invalid thread pool!").
    """
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    rounded_gaussian(KEY, "tables", std=Fraction(1), count=1)
