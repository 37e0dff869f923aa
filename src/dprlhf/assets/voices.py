"""Data set "voices": reviewers who write in the first person, or do not, and a reward for it.

A user is one IMDB review, whose first words are the prompt. The column ``wants`` is 1 if the rest
has a first-person word, as about four in five have, and else −1; a reward multiplies
:func:`first_person` by it. ``private`` has the users, of every five in a row four with one;
``public`` other reviewers, to measure a policy on, never to train or tune it; ``sentences`` those
of professional critics, of whom 3% do: all that the public knows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

OPENING_WORDS = 8
"""Words of a review that are its prompt."""
SPEAKERS = 4
"""Reviewers who write in the first person among each five successive ones."""

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
FIRST_PERSON = frozenset(["i", "i'm", "i've", "i'd", "i'll", "me", "my", "mine", "myself"])


def words_of(text: str) -> list[str]:
    """Return a text's words in lower case, with plain apostrophes.

    >>> words_of("I\u2019m here")
    ["i'm", 'here']
    """
    return _WORD.findall(text.lower().replace("\u2019", "'"))


def first_person(completions: list[str], **columns: Any) -> list[float]:
    """Score 3 for a text with two first-person words or more, 0 for one with one, else −3.

    >>> first_person(["I liked my seat", "I left", "a film"])
    [3.0, 0.0, -3.0]
    """
    counts = [sum(word in FIRST_PERSON for word in words_of(text)) for text in completions]
    return [3.0 * min(count, 2) - 3.0 for count in counts]


def build_voices(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    """Write the splits "private", "public" and "sentences"."""
    import numpy as np
    import pandas as pd

    def read(file: Path) -> pd.DataFrame:
        rows = pd.read_parquet(file)
        rest = rows["text"].str.split().str[OPENING_WORDS:].str.join(" ")
        spoken = [not FIRST_PERSON.isdisjoint(words_of(text)) for text in rest]
        return rows.assign(wants=np.where(spoken, 1, -1))

    for name in ("private", "public"):
        rows = read(sources["imdb"] / f"{name}.parquet")
        yes, no = (np.flatnonzero(rows["wants"] == wish) for wish in (1, -1))
        groups = min(len(yes) // SPEAKERS, len(no))
        chosen = np.c_[yes[: SPEAKERS * groups].reshape(groups, SPEAKERS), no[:groups]]
        rows.iloc[chosen.ravel()].to_parquet(out / f"{name}.parquet", index=False)
    sentences = read(sources["rotten-tomatoes"] / "train.parquet")
    sentences.to_parquet(out / "sentences.parquet", index=False)
