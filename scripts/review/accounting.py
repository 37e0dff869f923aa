"""Accounted costs that were far larger than need be, before and after.

Writes rows to ``docs/results/review.json``, in about a minute on one core. With ``--before`` it
measures an older source, which is to be first on the path::

    PYTHONPATH=../before/src python -m scripts.review.accounting --before
    PYTHONPATH=src python -m scripts.review.accounting
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq

from dprlhf.privacy import composition
from dprlhf.privacy.accounting import Mechanism, epsilon, noise_multiplier
from dprlhf.privacy.filter import filter_share
from dprlhf.runs.declared import declare
from dprlhf.runs.measurements import Result, write_results

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "review.json"
DELTA = 1e-5
RUN = Mechanism(1.0, 100)


def adaptive_budget(runs: int, before: bool) -> float:
    """Return ε of the smallest budget that these runs fit in, where plans may follow results."""
    if before:
        stated: Any = composition
        return float(stated.adaptive_epsilon([RUN] * runs, DELTA))
    within = lambda budget: filter_share({RUN: runs}, budget, DELTA) - 1  # noqa: E731
    return float(brentq(within, 0.5, 20.0, xtol=1e-4))


def declared(history: list[tuple[float, float, int]]) -> tuple[float, str]:
    """Return ε of training elsewhere, by Poisson sampling, and what another library allows."""
    accountant = PLDAccountant()
    for noise, rate, steps in history:
        sampled = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
        accountant.compose(SelfComposedDpEvent(sampled, steps))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text("{}")
        found = declare(folder, history, delta=DELTA).epsilon
    return found, f"at most {1.005 * accountant.get_epsilon(DELTA):.4g}"


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", action="store_true", help="the source is an older one")
    before = parser.parse_args().before
    small = 1e-11
    figures = {
        "budget for one run of z = 1, 100 rounds": (adaptive_budget(1, before), "at most 1.3"),
        "budget for four of them": (adaptive_budget(4, before), "at most 1.7"),
        "epsilon of ten passes of 100 rounds at delta = 1e-11": (
            epsilon(Mechanism(1.0, 1000, participations=10), small).epsilon, "at most 3.5"),
        "noise multiplier of 10,000 Poisson rounds at delta = 1e-11": (
            noise_multiplier(1.0, small, rounds=10_000, partition="poisson", participations=3)[0],
            "at most 0.9"),
        "epsilon of a declared rate of 0.001 over 100 steps": declared([(0.8, 0.001, 100)]),
        "epsilon of 500 declared parts of one step": declared([(1.0, 0.01, 1)] * 500),
    }  # fmt: skip
    rows = []
    for name, (value, goal) in figures.items():
        holds, when = value <= float(goal.split()[-1]), "before" if before else "after"
        rows.append(Result(f"accounting: {name}, {when}", value, "1", goal, holds))
        print(f"{rows[-1].name}: {value:.4g}")
    write_results(OUT, rows)


if __name__ == "__main__":
    main()
