"""Private least-squares regression (PrivLS), one file for each oracle.

Each oracle finds w with small Σ_u (w · φ_u − A_u)² under differential privacy, for features φ
``[users, d]`` and targets A ``[users]``. :func:`fit` runs one by itself; inside a training round,
``solve`` takes callables that the gate answers (see :mod:`dprlhf.regression.oracle`).

======================  ==============  ==========================================================
name                    guarantee       made for
======================  ==============  ==========================================================
exponential             pure            a finite, public candidate set
sufficient-statistics   Gaussian        up to 2,000 dimensions, or a sketch; one release
issp                    (ε, δ)          few dimensions, many users, any condition number
improper-batch-sgd      Gaussian        any dimension; a clipped, not a linear, predictor
projected-sgd           Gaussian        any dimension; ‖w‖ ≤ W
======================  ==============  ==========================================================
"""

from dataclasses import fields
from typing import Any

from dprlhf.regression.exponential import Exponential
from dprlhf.regression.improper_batch_sgd import ImproperBatchSGD
from dprlhf.regression.issp import ISSP
from dprlhf.regression.oracle import Contribution, Fit, Guarantee, Release, Select
from dprlhf.regression.projected_sgd import ProjectedSGD
from dprlhf.regression.sketch import CountSketch
from dprlhf.regression.standalone import Oracle, fit
from dprlhf.regression.sufficient_statistics import SufficientStatistics

GaussianOracle = SufficientStatistics | ImproperBatchSGD | ProjectedSGD
ORACLES: dict[str, type[GaussianOracle]] = {
    "sufficient-statistics": SufficientStatistics,
    "improper-batch-sgd": ImproperBatchSGD,
    "projected-sgd": ProjectedSGD,
}
"""Those of a training round, by the name in a recipe."""


def make_oracle(name: str, **settings: Any) -> GaussianOracle:
    """Return the oracle of a recipe, which takes of all oracles' settings its own."""
    kind = ORACLES[name]
    return kind(**{field.name: settings[field.name] for field in fields(kind)})


__all__ = [
    "ISSP",
    "ORACLES",
    "Contribution",
    "CountSketch",
    "Exponential",
    "Fit",
    "GaussianOracle",
    "Guarantee",
    "ImproperBatchSGD",
    "Oracle",
    "ProjectedSGD",
    "Release",
    "Select",
    "SufficientStatistics",
    "fit",
    "make_oracle",
]
