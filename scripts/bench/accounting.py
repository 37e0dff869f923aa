"""The accountant's time against the number of rounds, beside pld-accounting's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from bench.measure import Tick, interleaved, ratio, seconds
from dprlhf.privacy import random_allocation
from dprlhf.privacy.accounting import Mechanism, epsilon, noise_multiplier
from dprlhf.runs.measurements import Result

ROUNDS = (10, 100, 1000, 10_000)
OTHERS_ROUNDS = 100  # pld-accounting takes minutes for 1,000 rounds
DELTA = 1e-5


def results(
    *, quick: bool, device: str, repeats: int, tick: Tick = lambda: None
) -> Iterator[Result]:
    """Yield median times at ε = 1, and of pld-accounting where it takes seconds."""
    for rounds in ROUNDS:
        z, _ = noise_multiplier(1.0, DELTA, rounds=rounds)
        ours = {
            "epsilon()": _anew(lambda z=z, t=rounds: epsilon(Mechanism(z, t), DELTA)),
            "noise_multiplier()": _anew(lambda t=rounds: noise_multiplier(1.0, DELTA, rounds=t)),
        }
        for name, times in interleaved(ours, repeats, tick).items():
            row = seconds(f"{name}, T={rounds}", times)
            yield Result(row.name, row.value, row.unit, "below 1 s", row.value < 1)
        if rounds <= (ROUNDS[0] if quick else OTHERS_ROUNDS):
            sides = {"ours": ours["epsilon()"], "theirs": lambda z=z, t=rounds: _pld(z, t)}
            times = interleaved(sides, 1 if quick else 3, tick)
            yield from ratio(
                f"pld-accounting over epsilon(), T={rounds}: time", times["theirs"], times["ours"]
            )


def _anew(account: Callable[[], Any]) -> Callable[[], Any]:
    """Return the same work without the points of the curve that earlier calls have kept."""

    def timed() -> Any:
        random_allocation.delta.cache_clear()
        return account()

    return timed


def _pld(z: float, rounds: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from PLD_accounting import gaussian_allocation_epsilon_range

        gaussian_allocation_epsilon_range(
            delta=DELTA, sigma=z, num_steps=rounds, epsilon_accuracy=0.05
        )
