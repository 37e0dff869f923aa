"""Private least-squares regression (PrivLS): w with small Σ_u (w · φ_u − A_u)², by five oracles.

:func:`fit` runs one by itself; ``docs/regression.md`` says which to take.
"""

from dprlhf.updates.oracles import ImproperBatchSGD, ProjectedSGD, SufficientStatistics
from papers.regression.exponential import Exponential
from papers.regression.in_memory import Oracle, descent, fit
from papers.regression.issp import ISSP

__all__ = [
    "ISSP", "Exponential", "ImproperBatchSGD", "Oracle", "ProjectedSGD", "SufficientStatistics",
    "descent", "fit",
]  # fmt: skip
