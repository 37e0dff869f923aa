"""Sampling: y ~ μ and y′ ~ π_t, several responses for each prompt (He & Zhou, Algorithm 1).

A matrix product rounds differently when its shape changes, and a rounded probability can change a
sampled token. If the shape of a micro-batch depended on who is in it, one user could so move what
others contribute, by far more than the clip norm allows. Micro-batches therefore have fixed shapes:
a row's prompt is padded to a width that its own length decides, and missing rows are filled up.

Shapes are not all: transformers leaves the attention mask out where no row is padded, and attention
without a mask is another kernel. Every row therefore starts with one more column that is masked.
"""

from dprlhf.rollout.batch import Responses, Tick, padded_width
from dprlhf.rollout.sampling import (
    keeps_outputs,
    resolve_batch_size,
    sample,
    sample_responses,
    without_fillers,
)

__all__ = [
    "Responses",
    "Tick",
    "keeps_outputs",
    "padded_width",
    "resolve_batch_size",
    "sample",
    "sample_responses",
    "without_fillers",
]
