"""Tasks of reasoning-gym, with its own scores as the reward (``pip install reasoning-gym``).

reasoning-gym (Stojanovski et al., arXiv 2505.24760) makes questions by a program, about a hundred
kinds of them, and scores answers to each. A recipe names the reward as
``function: dprlhf.rewards.reasoning:score``; a row has its question and, in the column ``entry``,
what the scoring needs. Other seeds give other questions, so public ones are easily had: these tasks
are for trying a method, and nothing in them is private.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dprlhf.data.messages import last_text
from dprlhf.errors import extra
from dprlhf.rewards.verifiable import final_answer

if TYPE_CHECKING:
    import pandas as pd

_APART = 10_000_000


def questions(task: str, count: int, *, seed: int, **settings: Any) -> pd.DataFrame:
    """Make questions of a task of reasoning-gym, the same ones whenever the arguments are the same.

    Save private and public ones with different seeds, as ``.parquet`` or ``.jsonl``, and name them
    in ``data`` and ``evaluation.data``.

    Args:
        task: Name of the task, such as ``chain_sum``.
        count: Number of questions, below 10 million.
        seed: Seed of the questions.
        **settings: Settings of the task, such as ``min_terms=2``.

    Returns:
        A table with the columns ``prompt``, ``answer`` and ``entry`` (JSON).

    Raises:
        DprlhfError: reasoning-gym is not installed.
    """
    import pandas as pd

    # Its question i is drawn with seed + i, so nearby seeds share most of their questions.
    made = _gym().create_dataset(task, size=count, seed=seed * _APART, **settings)
    rows = [(e["question"], str(e["answer"]), json.dumps(e, default=str)) for e in made]
    return pd.DataFrame(rows, columns=["prompt", "answer", "entry"])


def score(completions: Sequence[Any], entry: Sequence[str]) -> list[float]:
    """Return reasoning-gym's score of each completion, in [0, 1].

    The answer is the marked one (:func:`~dprlhf.rewards.verifiable.final_answer`), or else the
    whole completion without the spaces around it. An answer on which the scoring fails gets 0.

    Args:
        completions: Texts, or lists of messages of which the last one's content counts.
        entry: What :func:`questions` wrote into this column.

    Raises:
        DprlhfError: reasoning-gym is not installed.
    """
    gym = _gym()
    return [
        _score(gym, last_text(text), json.loads(row))
        for text, row in zip(completions, entry, strict=True)
    ]


def _score(gym: Any, text: str, entry: dict[str, Any]) -> float:
    judge = gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    try:
        return float(judge(final_answer(text) or text.strip(), entry))
    except Exception:  # Some of its scorers raise on an answer that they cannot read.
        return 0.0


def _gym() -> Any:
    with extra("reasoning", "a task of reasoning-gym"):
        return importlib.import_module("reasoning_gym")
