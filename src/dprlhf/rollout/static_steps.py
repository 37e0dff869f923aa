"""Decoding steps on tensors with fixed addresses, for CUDA graphs (transformers' static cache).

Starting a step's hundreds of short kernels from Python takes a GPU longer than running them. A CUDA
graph starts them at once, but repeats what was captured: the same kernels on the same memory. So a
step reads its tokens, positions, mask and place from fixed tensors, and writes keys and values at
that place of a full-sized cache, whose masked zeros add exact zeros. Its shapes follow from public
numbers alone. On a CPU the same step is called as it is, and tests repeat a recorded one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from dprlhf.policies import shared_prompt
from dprlhf.policies.causal_lm import CausalLMPolicy


class StaticLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's keys and values at full size, ``[rows, heads, places, size]``, written in place."""

    def __init__(self, layer: DynamicLayer, rows: int, places: int, now: torch.Tensor) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        _, heads, _, size = layer.keys.shape
        self.keys, self.values = (layer.keys.new_zeros(rows, heads, places, size) for _ in range(2))
        self._now = now

    def start(self, layer: DynamicLayer, row_of: torch.Tensor) -> None:
        """Take over the keys and values of the prompts, and forget all others."""
        # Masked values are multiplied by zero: an earlier micro-batch's NaN would reach these.
        columns = layer.keys.shape[2]
        for room, given in ((self.keys, layer.keys), (self.values, layer.values)):
            room[:, :, :columns] = given[row_of]
            room[:, :, columns:] = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a step at its places, and return those of all places."""
        self.keys.index_copy_(2, self._now, key_states)
        self.values.index_copy_(2, self._now, value_states)
        return self.keys, self.values


class StaticSteps:
    """The steps after the prefill, all of one shape; for any number of micro-batches in turn.

    The policy must not change meanwhile: a graph holds the memory of its parameters.
    """

    def __init__(
        self,
        policy: CausalLMPolicy,
        *,
        size: int,
        width: int,
        num_generations: int,
        max_new_tokens: int,
        cuda: Any = None,
    ) -> None:
        if cuda is None and policy.device.type == "cuda":
            cuda = torch.cuda
        self._policy, self._cuda, self._columns = policy, cuda, 1 + width
        self.shared = policy.shared_cache(num_generations, width, max_new_tokens)
        device, rows = policy.device, size * num_generations // self.shared
        # The last tokens are not read. One step there is in any case, to be tried.
        self._width = 1 + width + max(max_new_tokens - 1, 1) * self.shared
        self.prompt_of_row = torch.arange(size, device=device).repeat_interleave(rows // size)
        weight = policy.model.get_input_embeddings().weight
        unseen = torch.finfo(weight.dtype).min
        own = torch.zeros(self.shared, self.shared, dtype=weight.dtype, device=device)
        own = own.masked_fill_(~torch.eye(self.shared, dtype=torch.bool, device=device), unseen)
        self._own = own.repeat(rows, 1, 1, 1)
        self._bias = own.new_full((rows, 1, self.shared, self._width), unseen)
        self._tokens = self.prompt_of_row.new_zeros(rows, self.shared)
        self._positions = self._tokens.clone()
        self._now = torch.arange(self.shared, device=device) + self._columns
        self._cache: Any = None
        self._logits: torch.Tensor | None = None
        self._run: Callable[[], None] | None = None

    def start(self, mask: torch.Tensor, output: Any) -> None:
        """Begin with a micro-batch's prompts."""
        given = output.past_key_values
        if self._run is None:
            self._prepare(given, output.logits)
        for own, layer in zip(self._cache.layers, given.layers, strict=True):
            own.start(layer, self.prompt_of_row)
        of_rows = mask[self.prompt_of_row]
        seen = of_rows.bool()[:, None, None].expand(-1, 1, self.shared, -1)
        lowest = torch.finfo(self._bias.dtype).min
        self._bias.fill_(lowest)
        self._bias[..., : self._columns].masked_fill_(seen, 0)
        self._positions.copy_(of_rows.sum(1)[:, None].expand(-1, self.shared))
        self._now.copy_(torch.arange(self.shared, device=mask.device) + self._columns)

    def logits(self, tokens: torch.Tensor, step: int, cache: Any) -> torch.Tensor:
        """Return the next logits, ``[responses, vocabulary]``; the step after writes over them."""
        assert self._run is not None
        assert self._logits is not None
        self._tokens.copy_(tokens.view_as(self._tokens))
        self._run()
        self._now += self.shared
        # A response that has ended is computed on, where there may be no positions for it.
        self._positions.add_(1).clamp_(max=self._policy.last_position)
        return self._logits

    def _prepare(self, given: Any, logits: torch.Tensor) -> None:
        plain = (type(layer) is DynamicLayer and layer.is_initialized for layer in given.layers)
        assert all(plain), "steps_are_alike() leaves out models whose cache has other layers"
        self._cache = DynamicCache()
        rows = len(self.prompt_of_row)
        self._cache.layers = [
            StaticLayer(layer, rows, self._width, self._now) for layer in given.layers
        ]
        self._logits = logits.new_empty(rows * self.shared, logits.shape[-1])
        self._run = self._step if self._cuda is None else captured(self._step, self._cuda)

    def _step(self) -> None:
        assert self._logits is not None
        self._bias.index_copy_(3, self._now, self._own)
        output = self._policy.model(
            input_ids=self._tokens,
            attention_mask=self._bias,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._logits.copy_(output.logits.flatten(0, 1))


def captured(step: Callable[[], None], cuda: Any) -> Callable[[], None]:
    """Capture a step as a CUDA graph; what is returned repeats it."""
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        step()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def steps_are_alike(policy: CausalLMPolicy) -> bool:
    """Return whether a policy's steps can be made over fixed tensors.

    They cannot where the model looks back a fixed distance, keeps a state from token to token, has
    code of its own or is not tested, nor where it is quantised (not tested, either) or sharded over
    processes, which agree on each step.
    """
    from torch.distributed.tensor import DTensor

    return (
        shared_prompt.supported(getattr(policy.model, "config", None))
        and getattr(policy.network, "hf_quantizer", None) is None
        and not any(isinstance(p, DTensor) for p in policy.network.parameters())
    )
