"""Private training by another program, such as Opacus, as an earlier run that a total counts.

What the other program released is written beside the weights, as the record of a run of this
project is (:mod:`dprlhf.runs.lineage`). A run that starts from the weights is then refused unless
it names them under ``previous``, and its total composes both.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, PrivacyCost
from dprlhf.privacy.gaussian import upwards
from dprlhf.privacy.randomness import commitment
from dprlhf.runs.earlier import Record, cost_terms, records_of, total_of
from dprlhf.runs.lineage import attach, carried_by

History = Iterable[tuple[float, float, int]]
"""Noise multiplier, sampling rate and number of steps of each part of a training run: what
``PrivacyEngine.accountant.history`` has in Opacus."""

Sampling = Literal["poisson", "shuffled"]

_LEAST_RATE = 1e-9
"""A smaller sampling rate counts as this one, which costs more."""


def declare(
    folder: str | Path,
    history: History,
    *,
    delta: float,
    unit: str | None = None,  # The column whose values were protected; None where each row was
    sampling: Sampling = "poisson",
    program: str = "opacus",
) -> PrivacyCost:
    """Write what private training by another program released beside the weights that it left.

    Nothing here can check the declaration. ε, which is returned, is that of the terms, as for a
    run. ``history`` has noise multiplier, sampling rate and steps of each part, as Opacus's
    ``accountant.history`` does. ``sampling`` is ``poisson`` where each row joined each step
    independently; a row that was in one batch of each pass (``shuffled``) counts in full in that
    many steps, because no theorem covers the shuffling.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise DprlhfError(f"{folder}: no model that save_pretrained wrote (config.json)")
    if carried_by(str(folder)):
        raise DprlhfError(f"{folder}: it carries a privacy record already")
    if sampling not in get_args(Sampling):
        raise DprlhfError(f"sampling must be poisson or shuffled, not {sampling!r}")
    parts = list(history)
    if any(len(part) != 3 for part in parts):
        raise DprlhfError(
            "the history must have (noise multiplier, sampling rate, number of steps) for each part"
        )
    if sampling == "poisson":  # equal sampled steps are one part, wherever they stand
        counts: Counter[tuple[float, float]] = Counter()
        for noise, rate, steps in parts:
            _mechanism(noise, rate, steps, sampling)
            counts[noise, rate] += steps
        parts = [(*part, steps) for part, steps in counts.items()]
    mechanisms = [_mechanism(*part, sampling) for part in parts]
    if not mechanisms:
        raise DprlhfError("the history is empty: nothing was released")
    records = [
        Record(
            run=commitment(os.urandom(32)),
            name=folder.resolve().name,
            stage=program,
            unit=unit,
            delta=delta,
            mechanism=cost_terms(vars(mechanism)),
            disjoint=[],
        )
        for mechanism in mechanisms
    ]
    cost = total_of(records)
    protected = "one row" if unit is None else f"all rows with one value of '{unit}'"
    statement = (
        f"Declared, not checked: training with {program} was ({upwards(cost.epsilon, 4)},"
        f" {upwards(delta, 3)})-differentially private where {protected} is replaced by nothing."
    )
    attach(folder, {"statement": statement, "runs": [asdict(record) for record in records]})
    assert records_of(folder) == records
    return cost


def _mechanism(noise_multiplier: float, rate: float, steps: int, sampling: Sampling) -> Mechanism:
    if not 0 < rate <= 1:
        raise DprlhfError(f"the sampling rate must be above 0 and at most 1, not {rate}")
    if not 0 < noise_multiplier < math.inf:
        raise DprlhfError(f"the noise multiplier must be a number above 0, not {noise_multiplier}")
    if steps < 1:
        raise DprlhfError(f"the number of steps must be at least 1, not {steps}")
    if sampling == "poisson":
        rate = max(rate, _LEAST_RATE)
        passes = min(steps, math.ceil(rate * steps * (1 + 1e-12)))
        return Mechanism(noise_multiplier, steps, "poisson", participations=passes, rate=rate)
    # A pass that drops its last batch has fewer steps than 1/rate; of a tiny rate it is infinite.
    of_pass = min((1 + 1e-12) / rate, 2.0**53)
    passes = min(steps, math.ceil(steps / math.floor(of_pass)))
    return Mechanism(noise_multiplier, steps, "fixed", releases_per_round=passes)
