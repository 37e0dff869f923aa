"""Data sets of users whose taste the public does not know, made from real reviews.

A user is one IMDB review; the column ``wants`` says whether its author wants praise (1) or
criticism (−1) of a continuation, by the sign of its rating but in "house-style", and a reward
multiplies a sentiment score by it. ``private`` has the users, ``public`` other reviews, to measure
a policy on, never to train or tune it, and ``sentences`` Rotten Tomatoes sentences with 1 for each
wish: all that the public knows. "house-style" has a fourth, ``guides``: rows of ``public`` in which
cluster 1 wants praise and cluster 0 criticism, whatever the users want, to find the direction that
tells the clusters apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

BAD_RATINGS = 4
"""Number of bad ratings among each five successive users of the community."""
OPENING_WORDS = 8
"""Words of a review that decide its cluster in "house-style"; they are also the prompt."""
FLIPPED = 0.2
"""Share of the users of a cluster of "house-style" who want the opposite of it."""
FIRST_GUIDE = 1000
"""Row of the public reviews from which on they are also the guides of "house-style"."""
STYLES = {"wants": (1, 1), "wants_by_cluster": (-1, 1)}
"""What the two clusters of "house-style" want, by the column of the users' wishes."""
SEED = 20252
"""Seed of who these users are."""


def build_community(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    """Write "community": reviewers of whom four in five gave a bad rating and want criticism."""
    # Every five rows in a row hold four bad ratings, so that data.limit keeps the mix.
    _write(sources, out, partial(_by_rating, bad_for_each_good=BAD_RATINGS))


def build_balanced_reviews(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    """Write "balanced-reviews": as many reviewers who want praise as reviewers who do not."""
    # A policy gains only by what it reads in the prompt: praise for everybody earns nothing.
    _write(sources, out, partial(_by_rating, bad_for_each_good=1))


def build_house_style(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    """Write "house-style": reviewers of two clusters, who want praise or criticism in secret."""
    import pandas as pd

    _write(sources, out, house_style)
    guides = pd.read_parquet(out / "public.parquet").iloc[FIRST_GUIDE:].reset_index(drop=True)
    columns = {column: guides["cluster"].map(dict(enumerate(s))) for column, s in STYLES.items()}
    guides.assign(**columns).to_parquet(out / "guides.parquet", index=False)


def _by_rating(reviews: pd.DataFrame, bad_for_each_good: int) -> pd.DataFrame:
    import numpy as np

    good, bad = (np.flatnonzero(reviews["label"] == label) for label in (1, 0))
    groups = min(len(good), len(bad) // bad_for_each_good)
    taken = bad[: bad_for_each_good * groups].reshape(groups, bad_for_each_good)
    rows = np.c_[taken, good[:groups]]
    chosen: pd.DataFrame = reviews.iloc[rows.ravel()].reset_index(drop=True)
    chosen["wants"] = 2 * chosen["label"] - 1
    return chosen


def house_style(reviews: pd.DataFrame) -> pd.DataFrame:
    """Choose as many reviews of each of two clusters, for two secrets about what they want.

    A review is in cluster 1 if its first eight words say "I" or "this". By the column ``wants``
    both clusters want praise; by ``wants_by_cluster`` cluster 1 wants praise and cluster 0
    criticism. 20% of the users want the opposite. A policy trained without these users gains
    exactly 0 on average over a reward's weights w and −w; the best for them gains 0.6 of the
    reward's range.
    """
    import numpy as np

    words = reviews["text"].str.lower().str.split().str[:OPENING_WORDS]
    cluster = np.array([int(not {"i", "this"}.isdisjoint(some)) for some in words])
    one, zero = (np.flatnonzero(cluster == kind) for kind in (1, 0))
    pairs = min(len(one), len(zero))
    rows = np.c_[one[:pairs], zero[:pairs]].ravel()
    agrees = np.where(np.random.RandomState(SEED).random_sample(len(rows)) < FLIPPED, -1, 1)
    chosen: pd.DataFrame = reviews.iloc[rows].reset_index(drop=True)
    chosen["cluster"] = cluster[rows]
    for column, style in STYLES.items():
        chosen[column] = np.array(style)[cluster[rows]] * agrees
    return chosen


def _write(
    sources: dict[str, Path], out: Path, choose: Callable[[pd.DataFrame], pd.DataFrame]
) -> None:
    import pandas as pd

    for name in ("private", "public"):
        chosen = choose(pd.read_parquet(sources["imdb"] / f"{name}.parquet"))
        chosen.to_parquet(out / f"{name}.parquet", index=False)
    sentences = pd.read_parquet(sources["rotten-tomatoes"] / "train.parquet")
    praise = {name: 1 for name in chosen.columns if name.startswith("wants")}
    sentences.assign(**praise).to_parquet(out / "sentences.parquet", index=False)
