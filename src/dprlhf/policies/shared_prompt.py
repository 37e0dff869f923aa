"""Several responses to one prompt behind a single copy of it, in one row of the model's input.

Rows that answer one prompt repeat its tokens. In the order prompt, y₁, y₂, …, with each response's
positions counted on from the prompt's end and an attention mask under which no response sees
another, the model computes exactly what it computes for the rows one by one, and the prompt once.
A row belongs to one user as before.
"""

from __future__ import annotations

from typing import Any

import torch

_MODELS = frozenset(
    {"gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}
)
"""Model types that are tested to take positions and a mask of one's own as they are. Others count
positions from the mask, keep a state from token to token, or look back a fixed distance only."""


def supported(config: Any) -> bool:
    """Return whether a model with this configuration computes the same behind a shared prompt.

    A checkpoint that brings code of its own may do so under any name.
    """
    known = getattr(config, "model_type", None) in _MODELS
    return known and not any(getattr(config, n, None) for n in ("sliding_window", "auto_map"))


def best_shared_rows(num_generations: int, prompt: int, response: int, hidden: int) -> int:
    """Return how many of the responses to a prompt go behind one copy of it: a divisor of them.

    Each more saves a pass over the prompt and lengthens what attention goes over. In the same units
    a token costs 6 · hidden in a layer's matrix products and its row's length in attention.

    Args:
        num_generations: The number of responses to each prompt.
        prompt: tokens of a padded prompt.
        response: tokens of a response.
        hidden: the size of a hidden state.
    """

    def cost(shared_rows: int) -> float:
        tokens = prompt + shared_rows * (response - 1)
        return tokens * (6 * hidden + tokens) / shared_rows

    return min((c for c in range(1, num_generations + 1) if num_generations % c == 0), key=cost)


def behind_one_prompt(
    tokens: torch.Tensor, mask: torch.Tensor, responses: int, shared_rows: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the model's inputs, of ``rows / shared_rows`` rows.

    Args:
        tokens: ``[rows, prompt + response]``; so many adjacent rows each have one prompt.
        mask: 1 where a token is real, same shape.
        responses: the length of the response part.
        shared_rows: rows that go behind one prompt.
        dtype: of the attention mask.
    """
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
