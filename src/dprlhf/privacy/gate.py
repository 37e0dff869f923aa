"""The gate: the only place where a bounded sum over users becomes a released value."""

from __future__ import annotations

from collections import deque

import torch

from dprlhf.boundary import BoundedSum, Released, check_bounded
from dprlhf.errors import DprlhfError
from dprlhf.privacy.correlated_noise import square_root
from dprlhf.privacy.ledger import Entry, Ledger
from dprlhf.privacy.plan import Plan
from dprlhf.privacy.randomness import gaussian_noise

_PIECE = 2**22


class Gate:
    """Charges the ledger, then adds noise: one charge a round, for all J releases of that round.

    Args:
        plan: Noise multiplier, clip norm, divisor and J; the ledger opens with the same terms.
        ledger: The append-only record of what this run has spent.
        key: The run's secret key, which seeds the noise.
    """

    def __init__(self, plan: Plan, ledger: Ledger, key: bytes) -> None:
        self.plan = plan
        self.ledger = ledger
        self._key = key
        self._charge: Entry | None = None
        self._released = 0
        # With correlated noise: that of the last rounds, all that a later one reads.
        self._noises: deque[torch.Tensor] = deque(maxlen=plan.bands - 1)
        self._last = 0  # the round of the newest

    def release(self, t: int, bounded: BoundedSum) -> Released[torch.Tensor]:
        """Release (Σ g_u + N(0, (zS)² I)) / m, the Gaussian mechanism on a clipped sum.

        The first release of a round charges it; the plan's ``releases_per_round`` is the number of
        releases that this charge covers. A round that a crash cut short is spent: it is never taken
        up again.

        Args:
            t: The round, from 1.
            bounded: The sum over all of the round's users, ``[dimension]``. The noise is added in
                place, so the sum is gone afterwards.

        Returns:
            The noised mean, ``[dimension]``, float64. The divisor m is the plan's public constant,
            never the number of users that happened to be in the round.

        Raises:
            TypeError: The sum did not come from the clipping code.
            DprlhfError: The round was charged before, it has had all its releases, or the sum was
                clipped to another norm than the plan's.
        """
        check_bounded(bounded, "the gate")
        plan = self.plan
        if bounded.clip_norm != plan.clip_norm:
            raise DprlhfError(
                f"round {t}: a sum clipped to {bounded.clip_norm} is not the planned"
                f" clip_norm {plan.clip_norm}"
            )
        charge = self._charge_of(t)
        self._released += 1
        total = bounded.total
        if plan.bands > 1:
            total += plan.noise_std * self._correlated(t, total.numel())
        elif plan.noise_std:  # in pieces: a vector as long as the model exists once, not twice
            for number, piece in enumerate(total.split(_PIECE)):  # type: ignore[no-untyped-call]
                stream = self._stream(charge, self._released)
                piece += plan.noise_std * gaussian_noise(*stream, number, count=len(piece))
        total /= plan.expected_batch_size
        return Released(total, t)

    def _stream(self, charge: Entry, number: int) -> tuple[bytes, str, int, int, str]:
        """Return the name of a release's noise stream; the charge's hash holds a fresh nonce."""
        return self._key, "noise", charge.body["round"], number, charge.hash

    def _correlated(self, last: int, dimension: int) -> torch.Tensor:
        """Return row ``last`` of C⁻¹ξ, ``[dimension]``: the correlated noise of that round.

        A resumed run draws the noise of the rounds before it again.
        """
        root = square_root(self.plan.rounds, self.plan.bands)
        charges = {e.body["round"]: e for e in self.ledger.entries if e.kind == "charge"}
        for t in range(self._last, last):
            noise = torch.zeros(dimension, dtype=torch.float64)
            if t + 1 in charges:  # else left out, never released: there is nothing to take back
                own = gaussian_noise(*self._stream(charges[t + 1], 1), count=dimension)
                back = range(1, min(root.shape[1], t + 1))
                taken = sum((float(root[t, k]) * self._noises[-k] for k in back), torch.zeros(()))
                noise = (own - taken) / float(root[t, 0])
            self._noises.append(noise)
            self._last = t + 1
        return self._noises[-1]

    def _charge_of(self, t: int) -> Entry:
        plan = self.plan
        if self._charge is not None and self._charge.body["round"] == t:
            if self._released >= plan.releases_per_round:
                raise DprlhfError(
                    f"round {t} was charged before: its users are spent (releases planned"
                    f" for a round: {plan.releases_per_round})"
                )
            return self._charge
        terms = plan.terms()  # the ledger's spelling: JSON has no infinity
        self._charge = self.ledger.charge(
            t,
            noise_multiplier=terms["noise_multiplier"],
            clip_norm=terms["clip_norm"],
            releases_per_round=plan.releases_per_round,
        )
        self._released = 0
        return self._charge
