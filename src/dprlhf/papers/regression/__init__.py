"""Private least-squares regression (PrivLS), one file for each oracle.

Each oracle finds w with small Σ_u (w · φ_u − A_u)² under differential privacy, for features φ
``[users, d]`` and targets A ``[users]``. :func:`fit` runs one by itself; inside a training round,
``solve`` takes callables that the gate answers (see :mod:`dprlhf.updates.privls.oracle`).

======================  ==============  ==========================================================
name                    guarantee       made for
======================  ==============  ==========================================================
exponential             pure            a finite, public candidate set
sufficient-statistics   Gaussian        up to 2,000 dimensions; one release
issp                    (ε, δ)          few dimensions, many users, any condition number
improper-batch-sgd      Gaussian        any dimension; a clipped, not a linear, predictor
projected-sgd           Gaussian        any dimension; ‖w‖ ≤ W
======================  ==============  ==========================================================
"""

from dprlhf.papers.regression.exponential import Exponential
from dprlhf.papers.regression.issp import ISSP
from dprlhf.papers.regression.on_arrays import Oracle, fit
from dprlhf.updates.privls import ORACLES, GaussianOracle, make_oracle
from dprlhf.updates.privls.gradient_descent import ImproperBatchSGD, ProjectedSGD
from dprlhf.updates.privls.oracle import Contribution, Fit, Guarantee, Release, Select
from dprlhf.updates.privls.sufficient_statistics import SufficientStatistics

__all__ = [
    "ISSP",
    "ORACLES",
    "Contribution",
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
