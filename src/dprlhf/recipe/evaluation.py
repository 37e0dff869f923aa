"""Evaluation on public rows: what is measured before, during and after a run."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator

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


_TAKEN = frozenset({*MEASURES, "reward", "loss", "accuracy"})
_ENDINGS = ("_standard_error", "_win_rate", "_win_rate_low", "_win_rate_high")


class LossEvaluation(Settings):
    """Evaluation of a supervised stage on public rows, which costs no privacy.

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


class Evaluation(LossEvaluation):
    """Evaluation of a policy's responses to public prompts, which costs no privacy.

    Attributes:
        judges: Judges by name, each a function as ``rewards`` take it
            (``package.module:function`` or ``file.py:function``). A judge scores the responses to
            public prompts and trains nothing: it sees no private row, and its scores are not
            clipped. Judges may be changed when a run is continued.
    """

    judges: dict[str, str] = {}

    @field_validator("judges")
    @classmethod
    def _names(cls, judges: dict[str, str]) -> dict[str, str]:
        for name in judges:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r}: a judge's name has letters, digits and _ only")
            if name in _TAKEN or name.endswith(_ENDINGS):
                raise ValueError(f"{name!r} is the name of a built-in measure: take another")
        return judges
