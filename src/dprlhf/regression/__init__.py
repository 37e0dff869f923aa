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

from dprlhf.regression.exponential import Exponential
from dprlhf.regression.improper_batch_sgd import ImproperBatchSGD
from dprlhf.regression.issp import ISSP
from dprlhf.regression.oracle import Contribution, Fit, Guarantee, Release, Select
from dprlhf.regression.projected_sgd import ProjectedSGD
from dprlhf.regression.sketch import CountSketch
from dprlhf.regression.standalone import Oracle, fit
from dprlhf.regression.sufficient_statistics import SufficientStatistics

ORACLES = {
    "exponential": Exponential,
    "sufficient-statistics": SufficientStatistics,
    "issp": ISSP,
    "improper-batch-sgd": ImproperBatchSGD,
    "projected-sgd": ProjectedSGD,
}
"""By the name in a recipe."""

__all__ = [
    "ISSP",
    "ORACLES",
    "Contribution",
    "CountSketch",
    "Exponential",
    "Fit",
    "Guarantee",
    "ImproperBatchSGD",
    "Oracle",
    "ProjectedSGD",
    "Release",
    "Select",
    "SufficientStatistics",
    "fit",
]
