"""The clip norm that follows a quantile of the users' gradient norms."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dprlhf.recipe.base import Experimental, PositiveFloat, Settings

Share = Annotated[float, Field(gt=0, lt=1)]


class QuantileClip(Settings):
    """A clip norm that follows a quantile of the users' norms (Andrew et al., arXiv 1905.03871).

    Each release also counts, with noise, the users whose gradient was not clipped, and the clip
    norm of the next round grows where they are too few (:mod:`dprlhf.updates.adaptive_clip`).

    Attributes:
        quantile: Share γ of the users whose gradient should not be clipped.
        initial: Clip norm of the first round.
        step_size: Step size η: a round multiplies the clip norm by exp(η (γ − b)) for a noised
            share b of users not clipped.
        share: Share of the round's budget 1/z² that the count takes. The gradient's noise-to-clip
            ratio grows by 1/√(1 − share).
    """

    quantile: Annotated[Share, Experimental()]
    initial: PositiveFloat = 1.0
    step_size: PositiveFloat = 0.2
    share: Share = 0.05
