"""A bandit policy whose per-user gradients point in known directions: gradient-space canaries.

One number θ_u for each canary prompt u decides between two answers: log π(a|u) − log π(b|u) = θ_u.
So ∇ log π(·|u) lies along the coordinate of u alone, and a reward for one of the answers makes
every update move θ_u in a known direction. With a clip norm far below the gradients, each canary
contributes exactly the unit direction times S, as the strongest adversary would. All else is the
code of an ordinary run, from sampling and rewards to clipping, the gate and the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dprlhf.policies.causal_lm import CausalLMPolicy

ANSWERS = ("a", "b")
_END, _FIRST_PROMPT = 0, 3  # tokens 1 and 2 are the two answers


class _Bandit(nn.Module):
    def __init__(self, contexts: int) -> None:
        super().__init__()
        self.table = nn.Linear(contexts, 1, bias=False)
        self.head = nn.Linear(1, 3)
        nn.init.zeros_(self.table.weight)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[0.0], [0.5], [-0.5]]))
            self.head.bias.copy_(torch.tensor([-50.0, 0.0, 0.0]))  # the end is never sampled
        self.head.requires_grad_(False)
        self._adapted = True

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(embedding_dim=self.head.in_features)  # the hidden state is θ

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self._adapted = False
        try:
            yield
        finally:
            self._adapted = True

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **_: Any) -> Any:
        context = (input_ids[:, -logits_to_keep:] - _FIRST_PROMPT).clamp(min=-1) + 1
        one_hot = F.one_hot(context, self.table.in_features + 1)[..., 1:].float()
        theta = self.table(one_hot)
        logits = self.head(theta if self._adapted else 0 * theta)
        cache = SimpleNamespace(reorder_cache=lambda rows: None)
        return SimpleNamespace(logits=logits, past_key_values=cache)


class _Tokenizer:
    pad_token_id = eos_token_id = bos_token_id = _END

    def __call__(self, prompt: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [_FIRST_PROMPT + (int(prompt) if prompt.isdecimal() else 0)]}

    def decode(self, ids: torch.Tensor, **_: Any) -> str:
        return "".join(ANSWERS[i - 1] for i in ids.tolist() if i)


class BanditPolicy(CausalLMPolicy):
    """A policy over the prompts "0", "1", …, with one trainable parameter each.

    Args:
        contexts: Number of prompts, and of parameters.
    """

    def __init__(self, contexts: int) -> None:
        super().__init__(_Bandit(contexts), _Tokenizer())

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the parameters."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load parameters that :meth:`state` returned."""
        for name, p in self.parameters.items():
            p.copy_(state[name])
