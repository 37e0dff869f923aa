"""Evaluation on public rows: what is measured before, during and after a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dprlhf.recipe.base import PositiveInt, Settings
from dprlhf.recipe.data import PublicData

MEASURES = (
    "response_tokens", "ended_share", "distinct_1", "distinct_2", "kl", "kl_per_token",
    "perplexity",
)  # fmt: skip
"""Names of the built-in measures of responses (:mod:`dprlhf.training.measures`)."""

_LABELS = {
    "response_tokens": "tokens in a response",
    "ended_share": "share of responses that ended",
    "distinct_1": "different words per word",
    "distinct_2": "different pairs of words per word",
    "kl": "KL divergence from the base model, nats in a response",
    "kl_per_token": "KL divergence from the base model, nats in a token",
}


def measure_label(name: str) -> str:
    """Return a measure's name in words, for reports.

    >>> measure_label("distinct_1"), measure_label("rewards/margins")
    ('different words per word', 'rewards/margins')
    """
    return _LABELS.get(name, name.replace("_", " "))


class Evaluation(Settings):
    """Evaluation on public rows, of a stage's loss or of a policy's responses; it costs no privacy.

    Attributes:
        data: The public rows.
        prompts: Number of rows used, from the start; at least 2, for a standard error.
        every: Number of rounds between evaluations during the run; null evaluates before and after
            the run only.
        declared_public: Declares that these rows were public before and were chosen independently
            of the users. The run is then not refused if a user has one of them as well.
    """

    data: PublicData
    prompts: Annotated[int, Field(ge=2)] = 256
    every: PositiveInt | None = None
    declared_public: bool = False
