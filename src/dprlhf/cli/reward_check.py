"""``dprlhf reward-check``: the contract of a reward, checked on public prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dprlhf import recipe
from dprlhf.data.loading import listed, load_rows
from dprlhf.data.users import Users
from dprlhf.errors import DprlhfError
from dprlhf.rewards.check import ContractReport, check_reward
from dprlhf.rewards.loading import load_reward
from dprlhf.rewards.scoring import in_form_of

_STAND_INS = (
    "",
    " yes.",
    " I would be glad to help with that. First, read the question again.",
    " no no no no no no no no",
    " 42",
    " The answer depends on what you mean, but in most cases it is the second of the two.\n\n",
    " It was a wonderful afternoon, and nobody wanted to leave.",
    " It was a terrible afternoon, and everybody wanted to leave!!!",
)
"""Completions for files without any: empty, short, long, repetitive, pleasant, unpleasant."""

_CHECKS = {
    "answer": "one finite number or None for each completion",
    "repeat": "the same call gives the same scores",
    "alone": "a completion scores alone as in the batch",
    "order": "the reversed batch gives the same scores",
    "company": "copies of all rows in the batch change nothing",
}


def reward_check(
    function: str,
    prompts: str | Path,
    *,
    prompt_column: str = "prompt",
    completion_column: str = "completion",
    reward_range: float = 3.0,
    limit: int = 64,
) -> tuple[ContractReport, bool]:
    """Check a reward on a file of PUBLIC prompts, as a run does before its first round.

    Args:
        function: The reward, ``package.module:attribute`` or ``path/to/file.py:attribute``.
        prompts: File or data set of prompts, as in a recipe; its other columns reach the reward.
        prompt_column: Column of the prompts, texts or lists of chat messages.
        completion_column: Column of the completions to score; if it is missing, stand-ins are
            scored. All rows with the same prompt count as one user.

        reward_range: R > 0, for the share of scores outside [−R, R].

    Returns:
        The report, and whether the completions are stand-ins.

    Raises:
        DprlhfError: A check fails, or file or reward cannot be read; the message says which.
    """
    import datasets

    datasets.disable_progress_bars()
    if not reward_range > 0:
        raise DprlhfError(f"--reward-range {reward_range:g}: write a number above 0")
    data = recipe.Data(path=str(prompts), prompt_column=prompt_column, limit=limit)
    rows = load_rows(data)
    read = Users(rows, data).select(np.arange(len(rows)))  # as a run gives them to the reward
    texts, columns = read.prompts, read.columns
    stand_in = completion_column not in columns
    completions = columns.pop(completion_column, None) or in_form_of(
        texts, [_STAND_INS[i % len(_STAND_INS)] for i in range(len(texts))]
    )
    if faults := [i for i, one in enumerate(completions, 1) if not isinstance(one, str | list)]:
        raise DprlhfError(
            f"{prompts}: the column {completion_column!r} has no completion in"
            f" {listed(faults, 'row')}: fill or drop them"
        )
    reward = load_reward(recipe.Reward(function=function))
    return check_reward(reward, texts, completions, columns, bound=reward_range), stand_in


def explain(report: ContractReport, reward_range: float) -> str:
    """Return the checks, the measurements and a histogram of the scores, as text."""
    facts = {f"passed: {name}": meaning for name, meaning in _CHECKS.items()}
    facts["completions"] = f"{report.rows}, of {report.users} different prompts"
    facts["called"] = "for one user at a time" if report.per_user else "with a whole batch"
    facts["speed"] = f"{report.rows_per_second:,.0f} completions a second"
    facts["range"] = f"{report.minimum:.4g} to {report.maximum:.4g}, mean {report.mean:.4g}"
    facts["answers None"] = f"{report.missing:.0%}"
    facts[f"outside ±{reward_range:g}"] = f"{report.clipped:.0%} (clipped in training)"
    lines = [f"reward {report.name}", *(f"  {name}: {fact}" for name, fact in facts.items())]
    return "\n".join([*lines, *histogram([s for s in report.scores if s is not None])])


def histogram(values: Sequence[float], bins: int = 10, width: int = 40) -> list[str]:
    """Return a histogram as lines of text, one for each bin: its limits, a bar, the count.

    >>> print(*histogram([0.0, 0.0, 1.0], bins=2, width=4), sep="\\n")
             0 to        0.5  ████ 2
           0.5 to          1  ██ 1
    """
    low, high = min(values), max(values)
    if math.isclose(low, high):
        return [f"{low:>10.4g} for all {len(values)} completions: this reward cannot teach"]
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(bins * ((value - low) / (high - low))))] += 1
    edges = [low + (high - low) * i / bins for i in range(bins + 1)]
    return [
        f"{a:>10.4g} to {b:>10.4g}  {'█' * -(-width * n // max(counts))} {n}"
        for a, b, n in zip(edges, edges[1:], counts, strict=False)
    ]
