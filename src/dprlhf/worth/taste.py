"""A taste for words: what a community likes, as a secret sign for each of 32 public word groups.

The groups are of the commonest words of public film sentences, and words of a group stand between
the same neighbours. A secret w in {−1, +1}³² says which groups the users like. A text's utility is
the number of its different words that they like less those that they do not. Nothing public depends
on w, so a policy that was made without the users gains exactly 0 on average over w and −w.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.assets import path

GROUPS, WORDS, NEIGHBOURS, DIRECTIONS = 32, 1024, 256, 16
_SECRETS = 20254
"""Seed of the secrets."""
_WORD = re.compile(r"[a-z']+")


@cache
def groups() -> dict[str, int]:
    """Return the group of each of the 1,024 commonest words of the public sentences.

    Words are grouped by k-means on the leading directions of how much more often than by chance
    each of the 256 commonest words stands right before or after them.
    """
    import pandas as pd
    from scipy.cluster.vq import kmeans2

    texts = [words(str(t)) for t in pd.read_parquet(path("rotten-tomatoes") / "train.parquet").text]
    seen = [word for text in texts for word in text]
    names, counts = np.unique(seen, return_counts=True)
    common = {str(names[i]): n for n, i in enumerate(np.argsort(-counts, kind="stable")[:WORDS])}
    beside = np.zeros((WORDS, 2 * NEIGHBOURS))
    for text in texts:
        places = [common.get(word, WORDS) for word in text]
        for left, right in itertools.pairwise(places):
            if left < WORDS and right < NEIGHBOURS:
                beside[left, right] += 1
            if right < WORDS and left < NEIGHBOURS:
                beside[right, NEIGHBOURS + left] += 1
    chance = np.outer(beside.sum(1), beside.sum(0)) / beside.sum()
    more = np.log(np.maximum(beside, 1e-9) / np.maximum(chance, 1e-9)).clip(0)
    left_vectors, sizes, _ = np.linalg.svd(more, full_matrices=False)
    points = left_vectors[:, :DIRECTIONS] * sizes[:DIRECTIONS]
    points /= np.linalg.norm(points, axis=1, keepdims=True) + 1e-9
    _, found = kmeans2(points, GROUPS, minit="++", rng=np.random.default_rng(0))
    return {word: int(found[n]) for word, n in common.items()}


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def secret(number: int) -> NDArray[np.int64]:
    """Return a secret: the sign of each group, ``[32]``, half of them liked."""
    signs = np.repeat([1, -1], GROUPS // 2)
    return np.random.default_rng((_SECRETS, number)).permutation(signs)


def group_counts(text: str) -> NDArray[np.float64]:
    """Return the number of different words of each group in a text, ``[32]``."""
    known = groups()
    found = [known[word] for word in set(words(text)) if word in known]
    return np.bincount(found, minlength=GROUPS).astype(np.float64)


def reward_of(number: int) -> Callable[..., list[float]]:
    """Return the reward of a secret, with TRL's signature; it scores each continuation alone."""

    def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        return [float(group_counts(text) @ secret(number)) for text in completions]

    return reward


def __getattr__(name: str) -> Any:
    """Return ``reward_N``, the reward of secret N, as recipes name it."""
    if re.fullmatch(r"reward_\d+", name):
        return reward_of(int(name.removeprefix("reward_")))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def prefers(
    first: NDArray[np.float64], second: NDArray[np.float64], random: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw who likes the first text better, by Bradley and Terry: p = 1 / (1 + exp(u₂ − u₁)).

    Args:
        first: Utility u₁ of each user's first text, ``[users]``.
        second: Utility u₂ of its second text.
        random: Draws one number for each user.
    """
    return random.random(len(first)) < 1 / (1 + np.exp(second - first))
