"""The synthetic data set "private-answers": questions whose right answers only users know.

A secret map gives each of 16 intents one of 8 codes, each code to two; a user is one question with
the code of its intent in the column ``answer``. ``private`` has the users, ``test`` questions of
other users with the same codes, to measure a policy on, never to train or tune it, and ``public``
questions of others with codes drawn uniformly: nothing about the map is public. A policy made
without the private users answers 1/8 of the questions right, on average over the maps.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

INTENTS = (
    "address", "booking", "cancellation", "complaint", "delivery", "discount", "exchange",
    "invoice", "passport", "password", "payment", "receipt", "refund", "repair", "upgrade",
    "warranty",
)  # fmt: skip
"""What a question is about; each is named once in its prompt."""
CODES = ("red", "blue", "green", "black", "white", "gold", "pink", "gray")
"""The answers; after a space each is one token of SmolLM2."""
TEMPLATES = ("a question about the {}", "please help with my {}", "{} wanted", "who handles a {}?")
"""Wordings of a question, by its intent."""
USERS = {"private": 20_000, "public": 4_000, "test": 2_000}
"""Number of users in each split of the asset."""
SEED = 20253
"""Seed of the asset's users and of its map; for other maps, call :func:`private_answers`."""


def build_private_answers(sources: dict[str, Path], out: Path, quiet: bool) -> None:
    """Write "private-answers": the splits of :func:`private_answers`, as Parquet files."""
    for name, rows in private_answers(USERS, seed=SEED).items():
        rows.to_parquet(out / f"{name}.parquet", index=False)


def secret_map(seed: int) -> dict[str, str]:
    """Return the code of each intent; each code belongs to two of them."""
    import numpy as np

    codes = np.random.RandomState(seed).permutation(np.repeat(CODES, len(INTENTS) // len(CODES)))
    return {intent: str(code) for intent, code in zip(INTENTS, codes, strict=True)}


def private_answers(users: dict[str, int], *, seed: int) -> dict[str, pd.DataFrame]:
    """Make questions with private answers, the same ones whenever the arguments are the same."""
    # Codes are listed in each prompt in an order of its own: a base model prefers the first ones.
    import numpy as np
    import pandas as pd

    known = secret_map(seed)
    numbers = iter(np.random.RandomState(seed).permutation(np.arange(100_000, 1_000_000)))
    made = {}
    for split, count in users.items():
        draw = np.random.RandomState(seed + 1 + list(USERS).index(split))
        rows = []
        for _ in range(count):
            intent = INTENTS[draw.randint(len(INTENTS))]
            asked = TEMPLATES[draw.randint(len(TEMPLATES))].format(intent)
            listed = ", ".join(CODES[i] for i in draw.permutation(len(CODES)))
            drawn = CODES[draw.randint(len(CODES))]
            canary = str(next(numbers))
            prompt = f"Codes: {listed}.\nRequest {canary}: {asked}\nCode:"
            rows.append((prompt, intent, drawn if split == "public" else known[intent], canary))
        made[split] = pd.DataFrame(rows, columns=["prompt", "intent", "answer", "canary"])
    return made
