"""Private least-squares regression (PrivLS) inside a training round, one file for each oracle.

Each oracle finds w with small Σ_u (w · φ_u − A_u)² for features φ ``[users, d]`` and targets A
``[users]``. Its ``solve`` takes callables that the gate answers (see
:mod:`dprlhf.updates.privls.oracle`). Oracles that no language model's round may ask, and all of
them on plain arrays, are in :mod:`dprlhf.papers.regression`.
"""

from dataclasses import fields
from typing import Any

from dprlhf.updates.privls.gradient_descent import ImproperBatchSGD, ProjectedSGD
from dprlhf.updates.privls.oracle import Contribution
from dprlhf.updates.privls.sufficient_statistics import SufficientStatistics

GaussianOracle = SufficientStatistics | ImproperBatchSGD | ProjectedSGD
ORACLES: dict[str, type[GaussianOracle]] = {
    "sufficient-statistics": SufficientStatistics,
    "improper-batch-sgd": ImproperBatchSGD,
    "projected-sgd": ProjectedSGD,
}
"""The oracles for training rounds, by their names in a recipe."""


def make_oracle(name: str, **settings: Any) -> GaussianOracle:
    """Return the oracle of this name; settings that it does not have are ignored."""
    kind = ORACLES[name]
    return kind(**{field.name: settings[field.name] for field in fields(kind)})


__all__ = [
    "ORACLES",
    "Contribution",
    "GaussianOracle",
    "ImproperBatchSGD",
    "ProjectedSGD",
    "SufficientStatistics",
    "make_oracle",
]
