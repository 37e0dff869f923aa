"""The section ``privacy``, the earlier runs (``previous``), and what a stated ε asks of all."""

from __future__ import annotations

import math
import os
import urllib.parse
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dprlhf.privacy.accounting import Adjacency, Partition
from dprlhf.recipe.base import IN_MEMORY, PositiveInt, Settings
from dprlhf.recipe.data import Data, PublicData

MOST_TUNING_RUNS = 10_000
"""Most runs that may be declared to have chosen the settings: each is composed with the others."""


class Privacy(Settings):
    """The privacy guarantee; give one of ``epsilon``, ``noise_multiplier`` and ``max_guess``.

    Attributes:
        epsilon: Largest ε that the run may spend; ``.inf`` is a non-private baseline.
        noise_multiplier: Noise multiplier z, the noise's standard deviation in units of the clip
            norm; ε then follows from it.
        max_guess: Largest probability that a guess from all that the run releases, whether a person
            took part, is right at even odds; noise and ε then follow from it
            (:mod:`dprlhf.privacy.risk`).
        delta: δ; keep it well below 1 / (number of users).
        partition: How users are assigned to rounds: ``random-allocation``, ``fixed``, ``stream`` or
            ``poisson`` (Poisson subsampling).
        adjacency: Neighbouring datasets: ``zero-out`` (also for null) replaces a user's data by
            nothing, ``replace-one`` by another user's. A run refuses ``add-remove``, since it
            publishes its number of users.
        participations: Number of rounds in which a user takes part (with ``poisson``: on average).
        bands: Number of rounds over which noise is correlated, so that later rounds cancel noise of
            earlier ones (matrix factorization, DP-FTRL); 1 is independent noise. Above 1, not with
            ``poisson``; with ``random-allocation`` only for one participation, ``zero-out`` and up
            to 128 rounds (see :mod:`dprlhf.privacy.correlated_noise`).
        tuning_runs: Declares how many runs on the same users served to choose these settings. Each
            counts as a run with this one's noise and rounds, so it must have had at least this
            noise; name runs with other settings under ``previous``. Null declares nothing.
        book: Budget book that counts what the users spend over all runs: a SQLite file, or
            ``postgresql://HOST/DATABASE`` without a password. Null takes the environment variable
            ``DPRLHF_BOOK``; ``none`` uses no book.
        dataset: Name of the users' data set in the book; null takes the only one.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    max_guess: Annotated[float, Field(gt=0.5, lt=1)] | None = None
    delta: float = 1e-5
    partition: Partition = "random-allocation"
    adjacency: Adjacency | None = None
    participations: PositiveInt = 1
    bands: PositiveInt = 1
    tuning_runs: Annotated[int, Field(ge=0, le=MOST_TUNING_RUNS)] | None = None
    book: str | None = None
    dataset: str | None = None

    @property
    def baseline(self) -> bool:
        """Whether the run is a non-private baseline, without noise."""
        return self.epsilon == math.inf or self.noise_multiplier == 0

    def asking(self, **one: float | None) -> Self:
        """Return this section with one of ε, noise and guess in the place of the one it has."""
        none = dict.fromkeys(("epsilon", "noise_multiplier", "max_guess"))
        return self.model_copy(update={**none, **one})

    @model_validator(mode="after")
    def _valid(self) -> Privacy:
        given = (self.epsilon, self.noise_multiplier, self.max_guess)
        if sum(value is not None for value in given) != 1:
            raise ValueError("give exactly one of epsilon, noise_multiplier and max_guess")
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, not {self.epsilon}")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be at least 0, not {self.noise_multiplier}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, not {self.delta}")
        url = urllib.parse.urlsplit(self.book if self.book and "://" in self.book else "")
        if url.password is not None or "password" in url.query:
            raise ValueError(
                "book: a recipe is public, so the book's URL must have no password here: set"
                " DPRLHF_BOOK or PGPASSWORD, or use ~/.pgpass"
            )
        return self


class Previous(Settings):
    """An earlier private run that this one builds on, or that had some of the same users.

    Attributes:
        run: Its run folder, or a model that it produced, in a folder or on the hub, with its
            privacy record.
        users: ``shared`` if a user may be in both runs, so that the costs compose; ``disjoint`` if
            nobody is, so that the larger cost counts. ``disjoint`` is your declaration; it is
            refused if the ``secret/`` folders of the two runs contradict it.
    """

    run: str
    users: Literal["shared", "disjoint"] = "shared"


def check_shared(recipe: Any) -> None:
    """Refuse what would make the stated ε wrong, publish what is private, or lack public rows."""
    data, subspace = recipe.data, recipe.update.subspace
    public = recipe.evaluation.data if recipe.evaluation else None
    if math.isinf(recipe.update.clip_norm) and not recipe.privacy.baseline:
        raise ValueError("update.clip_norm must be finite unless privacy.epsilon is .inf")
    if public is not None and same_rows(data, public):
        raise ValueError(
            "evaluation.data names the private users: evaluation writes prompts and scores in the"
            " open, so it needs public rows"
        )
    if subspace is not None and subspace.data is not None and same_rows(data, subspace.data):
        raise ValueError(
            "update.subspace.data names the private users: the directions that are fitted to it are"
            " used without noise, so it needs public rows"
        )
    if subspace is not None and subspace.data is None and public is None:
        raise ValueError(
            "update.subspace needs public rows: give update.subspace.data, or evaluation with"
            " more rows than evaluation.prompts"
        )
    if subspace is not None and recipe.privacy.bands > 1 and subspace.refresh < recipe.rounds:
        raise ValueError(
            "privacy.bands: noise of earlier rounds is taken back along the directions of"
            " earlier rounds: set update.subspace.refresh to the number of rounds, or bands 1"
        )
    if recipe.policy.adapter.init != "random" and public is None:
        raise ValueError(
            f"policy.adapter.init: {recipe.policy.adapter.init} needs public rows (evaluation.data)"
        )


def same_rows(a: Data, b: Data | PublicData) -> bool:
    """Return whether two sections may name the same rows, ``skip`` and ``limit`` left aside."""
    if IN_MEMORY in (a.path, b.path) or _place(a.path) != _place(b.path):
        return False
    place = Path(_place(a.path))
    # A file, and a folder with one saved dataset, are read whatever name and split are asked for.
    if place.is_file() or (place / "dataset_info.json").is_file():
        return True
    # Two different slices of one split are taken to have no row in common.
    return a.name == b.name and any(
        one.partition("[")[0] == other.partition("[")[0]
        and (one == other or "[" not in one or "[" not in other)
        for one in a.split.split("+")
        for other in b.split.split("+")
    )


def _place(path: str) -> str:
    return os.path.realpath(path) if os.path.exists(path) else path
