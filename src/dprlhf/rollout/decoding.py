"""A compact decoding loop: one prefill per prompt, then one token per step and response.

Each row takes the token at which its cumulative probability passes its own uniform number for the
step (inverse CDF). What a user samples then does not depend on who else is in the micro-batch, on
its size, or on the process. Responses to a prompt go on behind one copy of its keys and values
where the model allows it (:mod:`dprlhf.policies.shared_prompt`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicLayer

from dprlhf.errors import DprlhfError
from dprlhf.hardware import to_device
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.shared_prompt import own_tokens_behind_prompt
from dprlhf.rollout.batch import token_rows

if TYPE_CHECKING:
    from dprlhf.rollout.static_steps import StaticSteps

_BLOCK = 256
_BELOW_ONE = 1 - 2.0**-53
_CPU_ROWS = 128


def inverse_cdf(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the first tokens whose cumulative probability exceeds the draw, ``[rows, draws]``."""
    # Summed over blocks of the vocabulary, then inside one, in float64: in float32 a late token's
    # mass drowns, and a draw can round to 1. A row whose logits are NaN gets the last token.
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    mass = scaled.softmax(1)
    if missing := -mass.shape[1] % _BLOCK:
        mass = F.pad(mass, (0, missing))
    blocks = mass.view(len(mass), -1, _BLOCK)
    of_blocks = blocks.sum(2).double()
    cumulative = of_blocks.cumsum(1)
    threshold = uniforms * cumulative[:, -1:]
    # right: the first entry above the threshold, so its own mass is not zero.
    block = torch.searchsorted(cumulative, threshold, right=True)
    block = block.clamp_(max=blocks.shape[1] - 1)  # a row of NaN must not end everybody's run
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    inside = blocks[rows, block].cumsum(2, dtype=torch.float64)
    left = threshold - (cumulative - of_blocks).gather(1, block)
    # Rounding may carry what is left of the threshold to the end of its block.
    left = torch.minimum(left, inside[..., -1] * _BELOW_ONE)
    token = torch.searchsorted(inside, left[..., None], right=True)[..., 0]
    return (block * _BLOCK + token).clamp_(max=logits.shape[1] - 1)


def draw(policy: CausalLMPolicy, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the next token of each response, from the distribution that the policy states.

    Logits are ``[rows, vocabulary]`` and numbers and tokens ``[rows, draws]``; before the first
    token, a row is a prompt.
    """
    if policy.sampling.plain:
        return inverse_cdf(logits, uniforms, policy.temperature)
    from dprlhf.policies.warpers import truncated, warped

    scores = warped(logits, policy.temperature)
    return inverse_cdf(truncated(scores, policy.sampling), uniforms, 1.0)


@torch.no_grad()
def decode(
    policy: CausalLMPolicy,
    prompts: Sequence[list[int] | None],
    uniforms: torch.Tensor,  # [prompts, num_generations, max_new_tokens]
    *,
    width: int,
    room: Sequence[int] | None = None,
    static: StaticSteps | None = None,
    watch: Callable[[torch.Tensor], None] | None = None,  # [rows, vocabulary]
) -> list[list[int]]:
    """Sample several responses for each prompt, which stays at its place among the prompts."""
    size, num_generations, max_new_tokens = uniforms.shape
    device, pad = policy.device, policy.tokenizer.pad_token_id
    ids, mask = (to_device(t, device) for t in _padded(prompts, width, pad))
    ends = torch.tensor(policy.end_tokens, device=device)
    draws = to_device(uniforms, device)
    most = [0 if p is None else max_new_tokens for p in prompts]
    if room is not None:
        most = [min(both) for both in zip(most, room, strict=True)]
    left = to_device(torch.tensor(most).repeat_interleave(num_generations), device)
    tokens = torch.full((size * num_generations, max_new_tokens), pad, device=device)
    ended = left == 0
    lengths = torch.zeros_like(left)
    output = _prefill(policy, ids, mask)
    logits, cache = output.logits[:, -1], output.past_key_values
    # A row of the first logits is a prompt; from here on, a row is a response.
    steps: Steps | StaticSteps
    if static is not None:
        steps = static
        static.start(mask, output)
    else:
        steps = Steps(policy, mask, num_generations, max_new_tokens)
        cache.reorder_cache(steps.prompt_of_row)
        reserve(cache, (max_new_tokens - 1) * steps.shared)  # the last tokens are not read
    for step in range(max_new_tokens):
        if watch is not None:
            watch(logits)
        now = draws.reshape(len(logits), -1, max_new_tokens)[:, :, step]
        chosen = draw(policy, logits, now).flatten()
        tokens[:, step] = torch.where(ended, pad, chosen)
        lengths += ~ended
        ended |= torch.isin(chosen, ends)
        if policy.stop is not None:
            ended |= policy.stop.completed(tokens[:, : step + 1])
        ended |= lengths == left
        if step + 1 == max_new_tokens or bool(ended.all()):
            break
        logits = steps.logits(tokens[:, step], step, cache)
    return [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]


@torch.no_grad()
def try_last_step(
    policy: CausalLMPolicy,
    *,
    size: int,
    width: int,
    num_generations: int,
    max_new_tokens: int,
    static: StaticSteps | None = None,
) -> None:
    """Make the last step of :func:`decode` on fillers: of all steps, it needs most memory."""
    # One row writes a cache as long as at that step; all rows get a copy, as in decoding.
    device, pad = policy.device, policy.tokenizer.pad_token_id
    ids, mask = (t.to(device) for t in _padded([None] * size, width, pad))
    rows, last, cache = size * num_generations, max(max_new_tokens - 2, 0), None
    steps: Steps | StaticSteps
    if static is not None:
        steps = static
        static.start(mask, _prefill(policy, ids, mask))
    else:
        steps = Steps(policy, mask, num_generations, max_new_tokens)
        long = (t.to(device) for t in _padded([None], width + last * steps.shared, pad))
        cache = _prefill(policy, *long).past_key_values
        cache.reorder_cache(torch.zeros_like(steps.prompt_of_row))
        reserve(cache, steps.shared)
    logits = steps.logits(torch.full((rows,), pad, device=device), last, cache)
    half = torch.full((rows, 1), 0.5, dtype=torch.float64, device=device)
    draw(policy, logits, half)


def _prefill(policy: CausalLMPolicy, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    """Run the model on the prompts; the output has the last place's logits and the cache."""
    output = policy.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=policy.position_ids(mask),
        use_cache=True,
        logits_to_keep=1,
    )
    if getattr(output, "past_key_values", None) is None:
        raise DprlhfError(
            f"policy.model_name_or_path: {type(policy.network).__name__} returns no keys and values"
            " to go on from (past_key_values), by which responses are sampled: take another model"
        )
    return output


class Steps:
    """The model's inputs in the steps after the prefill, for all responses at once."""

    def __init__(
        self, policy: CausalLMPolicy, mask: torch.Tensor, num_generations: int, max_new_tokens: int
    ) -> None:
        self._policy, self._columns = policy, mask.shape[1]
        # Responses behind one copy of their prompt's keys and values, in one row of the input.
        self.shared = policy.shared_cache(num_generations, self._columns - 1, max_new_tokens)
        self.prompt_of_row = torch.arange(len(mask), device=mask.device).repeat_interleave(
            num_generations // self.shared
        )
        of_rows = mask[self.prompt_of_row]
        self._next = policy.position_ids(of_rows)[:, -1:] + 1
        self._last = policy.last_position
        if self.shared > 1:
            dtype = policy.model.get_input_embeddings().weight.dtype
            self._seen = own_tokens_behind_prompt(of_rows, self.shared, max_new_tokens, dtype)
        else:
            self._seen = F.pad(of_rows, (0, max_new_tokens), value=1)

    def logits(self, tokens: torch.Tensor, step: int, cache: Any) -> torch.Tensor:
        """Return the logits after one more token of each response, ``[responses, vocabulary]``."""
        output = self._policy.model(
            input_ids=tokens.view(-1, self.shared),
            attention_mask=self._seen[..., : self._columns + (step + 1) * self.shared],
            # A response that has ended is computed on, where there may be no positions for it.
            position_ids=(self._next + step).clamp(max=self._last).expand(-1, self.shared),
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits.flatten(0, 1)
        return logits


def _padded(
    prompts: Sequence[list[int] | None], width: int, pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts padded on the left and their mask, ``[prompts, 1 + width]``."""
    rows = [[pad] if prompt is None else prompt for prompt in prompts]  # a filler's is one token
    return token_rows(rows, [[]] * len(rows), width=1 + width, length=0, padding=pad)


def batch_size(policy: CausalLMPolicy, *, prompt: int, response: int, rows: float) -> int:
    """Return how many responses to sample at once, a power of two, from public numbers only."""
    # A batch size decides shapes and shapes decide rounding. On a GPU it is what fits into half of
    # the free memory, on a CPU at most 128 (more was not faster), and no more than a round needs.
    most = _CPU_ROWS
    if policy.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(policy.device)
        # What an earlier run of this process has given back is still in torch's own hands.
        free += torch.cuda.memory_reserved(policy.device)
        free -= torch.cuda.memory_allocated(policy.device)
        most = max(1, free // 2 // bytes_per_row(policy, 1 + prompt + response))
    needed = 1 << max(0, math.ceil(rows) - 1).bit_length()
    return min(needed, 1 << (most.bit_length() - 1))


def bytes_per_row(policy: CausalLMPolicy, tokens: int) -> int:
    """Return an upper estimate of the memory in bytes for one row of ``tokens`` tokens."""
    config = policy.model.config.get_text_config()
    weight = policy.model.get_input_embeddings().weight
    vocabulary, hidden = weight.shape
    heads = getattr(config, "num_attention_heads", None) or 1  # none where a state is kept
    groups = getattr(config, "num_key_value_heads", None) or heads
    of_head = getattr(config, "head_dim", None) or hidden // heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    # Twice: the cache is copied when its room is reserved. The prefill holds one layer's
    # activations.
    cache = 2 * 2 * config.num_hidden_layers * groups * of_head * tokens
    prefill = (8 * hidden + 3 * inner) * tokens
    # Logits, and in float32 their copy, its softmax and both with padding. Truncation sorts them:
    # values and places, their masses in float64, and masks.
    copies = 4 if policy.sampling.plain else 14
    return int((cache + prefill + vocabulary) * weight.element_size() + copies * 4 * vocabulary)


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's keys and values, ``[rows, heads, places, size]``, with room for further places.

    transformers' own grows by ``torch.cat``, which copies all of them at every step.
    """

    def __init__(self, layer: DynamicLayer, more: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self._room = [F.pad(x, (0, 0, 0, more)) for x in (layer.keys, layer.values)]
        self._show(layer.keys.shape[2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values behind those that are there, and return all of them as views."""
        start, more = self.keys.shape[2], key_states.shape[2]
        self._show(start + more)
        self.keys[:, :, start:], self.values[:, :, start:] = key_states, value_states
        return self.keys, self.values

    def _show(self, places: int) -> None:
        if places > self._room[0].shape[2]:
            raise ValueError(f"{places} places where {self._room[0].shape[2]} are reserved")
        self.keys, self.values = (room[:, :, :places] for room in self._room)


def reserve(cache: Any, more: int) -> None:
    """Reserve room for so many places in each layer that grows by copying."""
    layers = getattr(cache, "layers", [])
    for number, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            layers[number] = ReservedLayer(layer, more)
