"""Several responses behind a single copy of their prompt, in one row of the model's input.

A row has the order prompt, y₁, y₂, …; each response's positions continue from the prompt's end, and
an attention mask hides the responses from one another. The model computes what it computes for
separate rows, and the prompt once. A row still belongs to one user.
"""

from __future__ import annotations

from typing import Any

import torch

_MODELS = frozenset(
    {"gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}
)
"""Model types that are tested to use the positions and the mask that they are given. Others count
positions from the mask, keep a state from token to token, or look back a fixed distance only."""


def supported(config: Any) -> bool:
    """Return whether a model with this configuration computes the same behind a shared prompt."""
    # A checkpoint with code of its own (auto_map) is not, whatever its name.
    known = getattr(config, "model_type", None) in _MODELS
    return known and not any(getattr(config, n, None) for n in ("sliding_window", "auto_map"))


def patched(network: Any) -> bool:
    """Return whether a model may compute something else than transformers' class of its type."""
    # By a class of the program's own, or a forward put into a module. accelerate's hooks, which
    # move tensors between devices, change no value.
    return not type(network).__module__.startswith("transformers.") or any(
        "forward" in vars(module) and not hasattr(module, "_hf_hook")
        for module in network.modules()
    )


def best_shared_rows(num_generations: int, prompt: int, response: int, hidden: int) -> int:
    """Return the fastest number of responses behind one copy of their prompt."""
    # One more saves a pass over the prompt and lengthens the row for attention. A token costs 6 ·
    # hidden in a layer's products and its row's length in attention.

    def cost(shared_rows: int) -> float:
        tokens = prompt + shared_rows * (response - 1)
        return tokens * (6 * hidden + tokens) / shared_rows

    return min((c for c in range(1, num_generations + 1) if num_generations % c == 0), key=cost)


def behind_one_prompt(
    tokens: torch.Tensor, mask: torch.Tensor, responses: int, shared_rows: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the model's inputs, with ``rows / shared_rows`` rows."""
    rows, width = tokens.shape
    prompt, own = width - responses, responses - 1  # nothing stands after the last token

    def joined(x: torch.Tensor) -> torch.Tensor:
        of_responses = x[:, prompt:-1].reshape(rows // shared_rows, -1)
        return torch.cat([x[::shared_rows, :prompt], of_responses], dim=1)

    place = torch.arange(prompt + shared_rows * own, device=tokens.device)
    # Part 0 is the prompt, part j the j-th response: a place sees what came before it in both.
    part = (place - prompt).div(max(own, 1), rounding_mode="floor").clamp(min=-1) + 1
    seen = (place[:, None] >= place) & ((part == 0) | (part[:, None] == part))
    seen = seen & joined(mask)[:, None, None, :].bool()
    seen = seen | (place[:, None] == place)  # where padding sees nothing, attention may be NaN
    added = torch.zeros(seen.shape, dtype=dtype, device=tokens.device)  # to attention's scores
    # A response's first token is predicted at the prompt's last place, which all of them share.
    first = place.new_full((shared_rows, 1), prompt - 1)
    before = torch.cat([first, place[prompt:].view(shared_rows, own)], dim=1)
    return {
        "input_ids": joined(tokens),
        "attention_mask": added.masked_fill_(~seen, torch.finfo(dtype).min),
        "position_ids": joined((mask.cumsum(1) - 1).clamp(min=0)),
        "logits_to_keep": before.flatten(),
    }


def most_behind_one_cache(num_generations: int, prompt: int, response: int) -> int:
    """Return how many responses to decode behind one copy of their prompt's keys and values."""
    # A copy fewer saves reading the prompt's, and attention passes over the other responses'
    # places. Measured on a CPU, more than twice the prompt's places save nothing.
    fits = [c for c in range(1, num_generations + 1) if c * response <= 2 * prompt]
    return max((c for c in fits if num_generations % c == 0), default=1)


def own_tokens_behind_prompt(
    mask: torch.Tensor,
    shared: int,
    max_new_tokens: int,
    dtype: torch.dtype,  # [rows, prompt]
) -> torch.Tensor:
    """Return what decoding adds to attention's scores, where responses share a prompt's cache."""
    # A row has the prompt's places, then every response's first token, every one's second token, …
    own = torch.eye(shared, dtype=torch.bool, device=mask.device).repeat(1, max_new_tokens)
    of_prompt = mask.bool()[:, None, None].expand(-1, 1, shared, -1)
    seen = torch.cat([of_prompt, own.expand(len(mask), 1, -1, -1)], dim=3)
    added = torch.zeros(seen.shape, dtype=dtype, device=mask.device)
    return added.masked_fill_(~seen, torch.finfo(dtype).min)
