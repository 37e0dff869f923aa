"""Private least-squares regression (PrivLS): w with small Σ_u (w · φ_u − A_u)², by five oracles.

:func:`fit` runs one by itself; inside a training round, ``solve`` takes callables that the gate
answers (:mod:`dprlhf.updates.privls.oracle`). ``exponential`` (pure) has a finite, public candidate
set; ``sufficient-statistics`` up to 2,000 dimensions and one release; ``issp`` few dimensions, many
users and any condition number; ``improper-batch-sgd`` (whose predictor is not linear) and
``projected-sgd`` any dimension.
"""

from dprlhf.updates.privls.gradient_descent import ImproperBatchSGD, ProjectedSGD
from dprlhf.updates.privls.sufficient_statistics import SufficientStatistics
from papers.regression.exponential import Exponential
from papers.regression.in_memory import Oracle, descent, fit
from papers.regression.issp import ISSP

__all__ = [
    "ISSP", "Exponential", "ImproperBatchSGD", "Oracle", "ProjectedSGD", "SufficientStatistics",
    "descent", "fit",
]  # fmt: skip
