"""The gate: the only place where a bounded sum over users becomes a released value."""

from __future__ import annotations

import torch

from dprlhf.boundary import BoundedSum, Released
from dprlhf.errors import DprlhfError
from dprlhf.plan import Plan
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.randomness import gaussian_noise


class Gate:
    """Charges the ledger, then adds noise, once for each round.

    Args:
        plan: fixes noise multiplier, clip norm and divisor; the ledger holds the same terms.
        ledger: this run's ledger.
        key: the run's secret key.
    """

    def __init__(self, plan: Plan, ledger: Ledger, key: bytes) -> None:
        self.plan = plan
        self.ledger = ledger
        self._key = key

    def release(self, round_: int, bounded: BoundedSum) -> Released[torch.Tensor]:
        """Release (Σ g_u + N(0, (zS)² I)) / m for one round.

        Args:
            round_: t, from 1; each round is released at most once.
            bounded: the sum over all of the round's users, ``[dimension]``.

        Returns:
            The noised mean, ``[dimension]``, float64. The divisor m is the plan's public constant,
            never the number of users that happened to be there.

        Raises:
            DprlhfError: the round was charged before, or the sum was clipped to another norm than
                the plan's.
        """
        plan = self.plan
        if bounded.clip_norm != plan.clip_norm:
            raise DprlhfError(
                f"round {round_}: a sum clipped to {bounded.clip_norm} is not the planned"
                f" clip_norm {plan.clip_norm}"
            )
        terms = plan.terms()  # the ledger's spelling: JSON has no infinity
        charge = self.ledger.charge(
            round_, noise_multiplier=terms["noise_multiplier"], clip_norm=terms["clip_norm"]
        )
        # The charge's hash is in the context: a stream belongs to one charge of one ledger.
        noise = gaussian_noise(self._key, "noise", round_, charge.hash, count=bounded.total.numel())
        return Released((bounded.total + plan.noise_std * noise) / plan.divisor, round_)
