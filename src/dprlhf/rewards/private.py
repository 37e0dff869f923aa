"""Score sampled responses as texts or as conversations, whichever the dataset's prompts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dprlhf.boundary import Private, open_private
from dprlhf.rewards.reward import RewardRows
from dprlhf.rewards.scoring import Scorer, Scores
from dprlhf.rollout import Responses


def score_private(scorer: Scorer, responses: Private[Responses]) -> Private[Scores]:
    """Score this round's responses of the private users; a reward's exceptions do not get out."""
    return Private(score_responses(scorer, open_private(responses), private=True))


def score_responses(scorer: Scorer, responses: Responses, *, private: bool = False) -> Scores:
    """Return the scores of all responses, ``[rows]``."""
    rows = rows_to_score(responses)
    scores = scorer.score(
        rows.prompts,
        rows.completions,
        rows.completion_ids,
        rows.columns,
        responses.user,
        turns=rows.turns,
        places=rows.places,
        private=private,
    )
    if responses.failed is None:
        return scores
    return Scores(**{**vars(scores), "valid": scores.valid & ~responses.failed})


def rows_to_score(responses: Responses) -> RewardRows:
    """Return the prompts, completions, token ids and columns that a reward is called with."""
    owner = responses.prompt.tolist()
    prompts = responses.asked or [responses.prompts.prompts[p] for p in owner]
    ids = [
        t[m.bool()].tolist()
        for t, m in zip(
            responses.tokens[:, -responses.max_new_tokens :], responses.response_mask, strict=True
        )
    ]
    columns = {
        name: [values[p] for p in owner] for name, values in responses.prompts.columns.items()
    }
    completions = responses.completions or in_form_of(prompts, responses.texts)
    places = np.empty(len(responses.user), dtype=np.int64)
    grid = responses.grid.ravel()
    places[grid[grid >= 0]] = np.flatnonzero(grid >= 0)
    extra = {**columns, **responses.extra}
    return RewardRows(prompts, completions, ids, extra, responses.turns, places.tolist())


def in_form_of(prompts: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    """Return completions in TRL's format: a text, or for a conversation an assistant message."""
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
