"""The gate: the only place where a bounded sum over users becomes a released value."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

import torch

from dprlhf.boundary import BoundedSum, Released, check_bounded
from dprlhf.errors import DprlhfError
from dprlhf.privacy.ledger import Entry, Ledger
from dprlhf.privacy.plan import Plan
from dprlhf.privacy.rounded_gaussian import grid_of, rounded_gaussian

_PIECE = 2**22


class Gate:
    """Charges the ledger, then adds noise: one charge a round, for all J releases of that round."""

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
        """Release (Σ g_u + N(0, (zS)² I)) / m, the Gaussian mechanism on a clipped sum, ``[d]``.

        m is the plan's public constant, never the number of users in the round. The first release
        of a round charges it, for the plan's ``releases_per_round``; a round that a crash cut short
        is spent.
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
        # Noise is added in place. Sum and noise are multiples of a power of two γ, about 2⁻³⁰ zS,
        # and the noise is drawn exactly. Rounding can move neighbours' sums apart by γ in each of d
        # coordinates, so the noise has standard deviation z(S + γ⌈√d⌉).
        total = bounded.total
        if plan.noise_std:
            grid = grid_of(plan.noise_multiplier, plan.clip_norm, len(total))
            total /= grid.spacing  # exact: a power of two
            total.round_()
            if plan.bands > 1:
                total += self._correlated(t, len(total), grid.std)
            else:  # in pieces: a vector as long as the model exists once, not twice
                pieces = total.split(_PIECE)  # type: ignore[no-untyped-call]
                for number, piece in enumerate(pieces):
                    stream = self._stream(charge, self._released)
                    piece += rounded_gaussian(*stream, number, std=grid.std, count=len(piece))
            total *= grid.spacing
        total /= plan.expected_batch_size
        return Released(total, t)

    def _stream(self, charge: Entry, number: int) -> tuple[bytes, str, int, int, str]:
        """Return the name of a release's noise stream; the charge's hash holds a fresh nonce."""
        return self._key, "noise", charge.body["round"], number, charge.hash

    def _correlated(self, last: int, dimension: int, std: Fraction) -> torch.Tensor:
        """Return row ``last`` of C⁻¹σξ, rounded row by row: the noise of that round, ``[d]``."""
        # Row t is n_t = round((σξ_t − Σ_k C[t, t−k] n_{t−k}) / C[t, t]) with the integers n of the
        # rows before it, an exact sum. A resumed run draws the rows before it again.
        from dprlhf.privacy.correlated_noise import UNITS, square_root

        root = square_root(self.plan.rounds, self.plan.bands)
        for t in range(self._last, last):
            noise = torch.zeros(dimension, dtype=torch.int64, device="cpu")
            charge = self.ledger.charge_of(t + 1)
            # A round that was left out has nothing to take back. Nor has one of before charges had
            # nonces, whose noise was drawn otherwise.
            if charge is not None and "nonce" in charge.body:
                row = (root[t] * UNITS).astype(int)
                own = int(row[0])
                for k in range(1, min(len(row), t + 1)):
                    noise += int(row[k]) * self._noises[-k]
                rest = noise % own
                noise -= rest
                noise //= -own
                offset = (rest.numpy(), own)
                stream = self._stream(charge, 1)
                drawn = rounded_gaussian(
                    *stream, std=std * UNITS / own, count=dimension, offset=offset
                )
                noise += drawn.long()
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
