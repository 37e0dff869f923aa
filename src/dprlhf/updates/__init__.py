"""The private updates, one file for each algorithm."""

from dprlhf.updates.pg import policy_gradient_sum

UPDATES = {"pg": policy_gradient_sum}

__all__ = ["UPDATES", "policy_gradient_sum"]
