"""Small models whose per-user gradients point in known directions: gradient-space canaries.

One number θ_u for each canary prompt u decides between two answers: log π(a|u) − log π(b|u) = θ_u.
∇ log π(·|u) lies along the coordinate of u alone, and a reward for an answer moves θ_u in a known
direction. With a clip norm far below the gradients each canary contributes exactly the unit
direction times S, as the strongest adversary would. All else is the code of an ordinary run.
Supervised fine-tuning learns the same policy; a reward model has a number for each text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.classifier import RewardModel

ANSWERS = ("a", "b")
NOWHERE = "-"
"""How a prompt begins that no parameter belongs to: it moves nothing."""
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
        tokens = _FIRST_PROMPT + self.table.in_features
        return SimpleNamespace(weight=torch.empty(tokens, self.head.in_features))

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
        theta = self.table(_one_hot(input_ids[:, -logits_to_keep:], self.table.in_features))
        logits = self.head(theta if self._adapted else 0 * theta)
        seen = input_ids.shape[1]
        cache = SimpleNamespace(reorder_cache=lambda rows: None, get_seq_length=lambda: seen)
        return SimpleNamespace(logits=logits, past_key_values=cache)


def _one_hot(tokens: torch.Tensor, contexts: int) -> torch.Tensor:
    """Return the prompt that each token is, ``[..., contexts]``; zero for a token that is none."""
    context = (tokens - _FIRST_PROMPT).clamp(min=-1) + 1
    return F.one_hot(context, contexts + 1)[..., 1:].float()


class _Scores(nn.Module):
    """A classifier whose score of a text is the sum of θ over the prompts in it."""

    def __init__(self, contexts: int, outputs: int) -> None:
        super().__init__()
        self.table = nn.Linear(contexts, 1, bias=False)
        self.head = nn.Linear(1, outputs, bias=False)
        nn.init.zeros_(self.table.weight)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(outputs, 1))  # the other labels' scores stay at 0
        self.head.requires_grad_(False)

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=torch.empty(_FIRST_PROMPT + self.table.in_features, 1))

    def get_output_embeddings(self) -> None:
        """Return None: a classifier generates nothing."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        theta = self.table(_one_hot(input_ids, self.table.in_features).sum(1))
        return SimpleNamespace(logits=self.head(theta))


class _Tokenizer:
    pad_token_id = eos_token_id = bos_token_id = _END
    chat_template = None

    def __call__(self, text: str | list[str], **_: Any) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [[self._token(one)] for one in text]}
        return {"input_ids": [self._token(text)]}

    def _token(self, text: str) -> int:
        word = text.split(" ")[-1]
        if word in ANSWERS:
            return 1 + ANSWERS.index(word)
        return _FIRST_PROMPT + int(word) if word.isdecimal() else _END

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(ANSWERS[i - 1] for i in ids if i)


class _Small(CausalLMPolicy):
    """A policy without an adapter."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the parameters."""
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load parameters that :meth:`state` returned."""
        for name, p in self.parameters.items():
            p.copy_(state[name])


class BanditPolicy(_Small):
    """A policy over the prompts "0", "1", …, with one trainable parameter each."""

    def __init__(self, contexts: int) -> None:
        super().__init__(_Bandit(contexts), _Tokenizer())


class BanditRewardModel(_Small, RewardModel):
    """A reward model whose score of the text "0", "1", … is one trainable parameter each."""

    def __init__(self, contexts: int, labels: int | None = None) -> None:
        super().__init__(_Scores(contexts, labels or 1), _Tokenizer())
