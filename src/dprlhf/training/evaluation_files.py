"""What a run's folder tells of its evaluations: figures and sample responses to public prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dprlhf.training.evaluate import Evaluated, compared

SAMPLES = 5
"""Number of public responses that each evaluation during the run keeps."""


def first_samples(found: Evaluated, round_: int) -> Iterator[dict[str, Any]]:
    """Yield the first few prompts and responses of an evaluation during the run, with rewards."""
    for row, text in enumerate(found.responses.texts[:SAMPLES]):
        line: dict[str, Any] = {
            "round": round_,
            "prompt": found.responses.prompts.prompts[row],
            "response": text,
            "reward": float(found.rewards[row]),
        }
        if found.judges:
            line["judges"] = found.judged(row)
        yield line


def samples(before: Evaluated, after: Evaluated) -> list[dict[str, Any]]:
    """Return every public prompt with both policies' responses and their rewards."""
    found = []
    for row, prompt in enumerate(after.responses.prompts.prompts):
        sample: dict[str, Any] = {"prompt": prompt}
        for when, one in (("before", before), ("after", after)):
            sample[when] = one.responses.texts[row]
            sample[f"reward_{when}"] = float(one.rewards[row])
            if one.judges:
                sample[f"judges_{when}"] = one.judged(row)
        found.append(sample)
    return found


def figures(before: Evaluated, after: Evaluated) -> dict[str, Any]:
    """Return the estimates of both policies by name, and how they compare."""
    both = {"before": before, "after": after}
    found: dict[str, Any] = {
        when: {name: estimate.as_dict() for name, estimate in one.estimates.items()}
        for when, one in both.items()
    }
    found["compared"] = {name: one.as_dict() for name, one in compared(before, after).items()}
    return found
