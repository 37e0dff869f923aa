"""Sampling: y ~ μ and y′ ~ π_t, several responses for each prompt (He & Zhou, Algorithm 1).

How a matrix product or attention rounds depends on its shape and on a row's place in it, and a
rounded probability can change a sampled token. If either depended on other users, one user could so
move what others contribute, by far more than the clip norm allows. So every shape is a public
constant, and a row's place follows from the allocation and public numbers alone; a row that is
missing leaves a filler at its place. What is left to ask of a kernel is that, at a fixed shape and
place, a row's bits do not depend on the contents of other rows: ``docs/proofs/fixed_places.md``.

transformers leaves the attention mask out where no row is padded, and attention without a mask is
another kernel. Every row therefore starts with one more column that is masked.
"""

from dprlhf.rollout.batch import Responses, Tick
from dprlhf.rollout.sampling import (
    most_kept,
    public_sampling_settings,
    resolve_batch_size,
    sample,
    sample_public,
    sample_responses,
)

__all__ = [
    "Responses",
    "Tick",
    "most_kept",
    "public_sampling_settings",
    "resolve_batch_size",
    "sample",
    "sample_public",
    "sample_responses",
]
