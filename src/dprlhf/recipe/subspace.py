"""The setting ``update.subspace``: directions from public gradients."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from dprlhf.recipe.base import PositiveInt, Settings
from dprlhf.recipe.data import PublicData


class Subspace(Settings):
    """A few directions, computed on public prompts, along which users' gradients are released.

    A release then has ``rank`` coordinates instead of one for each trained parameter, so the norm
    of its noise is smaller by the square root of their ratio (:mod:`dprlhf.gradients.subspace`). It
    works with every adapter.

    Attributes:
        rank: Number p of directions.
        data: The public prompts. Null takes those rows of ``evaluation.data`` that the evaluation
            does not use.
        prompts: Number of prompts whose gradients are computed each time.
        refresh: Number of rounds for which directions are kept; 1 computes new ones every round.
        mean_first: Make the mean public gradient the first direction. At a small rank it captures
            more of the reward than directions of variation do: the public prompts give the axis,
            and the users' gradients the sign and size of the step along it.
        keep_perplexity: Make the directions orthogonal to the public gradient of the mean
            log-likelihood under the base model. A step then leaves the base model's perplexity of
            the responses unchanged to first order, so texts stay more fluent for the same reward.
            It takes another gradient pass over the public responses.
    """

    rank: PositiveInt = 16
    data: PublicData | None = None
    prompts: Annotated[int, Field(ge=2)] = 256
    refresh: PositiveInt = 1
    mean_first: bool = False
    keep_perplexity: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Subspace:
        if self.prompts < 2 * self.rank:
            raise ValueError(
                f"{self.prompts} prompts are too few for rank {self.rank}: take at least"
                f" {2 * self.rank}"
            )
        return self
