"""Several responses behind a single copy of their prompt, in one row of the model's input.

The rows of responses to one prompt repeat its tokens. Here one row has the order prompt, y₁, y₂, …;
the positions of each response continue from the prompt's end, and an attention mask hides the
responses from one another. The model then computes what it computes for separate rows, and the
prompt only once. A row still belongs to one user.
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
    """Return whether a model with this configuration computes the same behind a shared prompt.

    A checkpoint with code of its own is not supported, whatever its name.
    """
    known = getattr(config, "model_type", None) in _MODELS
    return known and not any(getattr(config, n, None) for n in ("sliding_window", "auto_map"))


def best_shared_rows(num_generations: int, prompt: int, response: int, hidden: int) -> int:
    """Return the fastest number of responses behind one copy of their prompt.

    One more response saves a pass over the prompt and makes the row longer for attention. In the
    same units, a token costs 6 · hidden in a layer's matrix products and its row's length in
    attention.

    Args:
        num_generations: Number of responses to each prompt; the result divides it.
        prompt: Tokens of a padded prompt.
        response: Tokens of a response.
        hidden: Size of a hidden state.
    """

    def cost(shared_rows: int) -> float:
        tokens = prompt + shared_rows * (response - 1)
        return tokens * (6 * hidden + tokens) / shared_rows

    return min((c for c in range(1, num_generations + 1) if num_generations % c == 0), key=cost)


def behind_one_prompt(
    tokens: torch.Tensor, mask: torch.Tensor, responses: int, shared_rows: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the model's inputs, with ``rows / shared_rows`` rows.

    Args:
        tokens: ``[rows, prompt + response]``; ``shared_rows`` adjacent rows share a prompt.
        mask: 1 for real tokens and 0 for padding, same shape.
        responses: Width of the response part, in tokens.
        shared_rows: Number of rows that go behind one copy of their prompt.
        dtype: Data type of the attention mask.
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
