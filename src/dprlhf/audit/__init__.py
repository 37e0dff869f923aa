"""Privacy auditing: attacks that give empirical lower bounds on ε and membership inference."""

from dprlhf.audit.bandit import BanditPolicy
from dprlhf.audit.guesses import epsilon_lower_bound, largest_tpr
from dprlhf.audit.judgement import Audit
from dprlhf.audit.membership import (
    Roc,
    combined_scores,
    exposure,
    likelihood_scores,
    membership_bound,
    membership_scores,
    roc,
    text_logprobs,
)
from dprlhf.audit.one_run import audit, audit_plan, audit_run

__all__ = [
    "Audit",
    "BanditPolicy",
    "Roc",
    "audit",
    "audit_plan",
    "audit_run",
    "combined_scores",
    "epsilon_lower_bound",
    "exposure",
    "largest_tpr",
    "likelihood_scores",
    "membership_bound",
    "membership_scores",
    "roc",
    "text_logprobs",
]
