"""Direct preference optimization (DPO, arXiv 2305.18290) on the users' own pairs: ``dprlhf dpo``.

The loss of a pair is a function of the margin m = Δ(chosen) − Δ(rejected), where Δ is log π/π_ref
of a completion and π_ref the policy with its adapter off. A user's loss is the mean over all of its
pairs, and the gradient of that is clipped: the user is the unit, not the pair. It departs from
TRL's ``DPOTrainer`` in this alone: prompt and completion are tokenized one after the other, and
each is cut to a length of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.data.users import Prompts
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import DPORecipe, PreferencePairs
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import log_ratio_to_base
from dprlhf.training.supervised import Supervised
from dprlhf.training.tasks import Lengths, end_token, in_common, lengths_of, pack, split_row

Array = NDArray[np.float64]


def preference_optimization(recipe: DPORecipe, sources: InMemoryInputs) -> Supervised:
    """Return the stage of ``dprlhf dpo``."""
    return Supervised(recipe, sources, PreferredAnswers)


class PreferredAnswers:
    """The DPO loss and its derivatives, as weights of log-probabilities."""

    rows = 2

    def __init__(self, spec: DPORecipe) -> None:
        self._data = spec.data
        self._update = spec.update
        self.metrics: tuple[str, ...] = spec.public_losses

    def encode(self, model: CausalLMPolicy, examples: Prompts) -> Responses:
        """Return two rows for each pair: the chosen completion and the rejected one."""
        return encode_pairs(self._data, model, examples)

    def lengths(self, model: CausalLMPolicy, examples: Prompts) -> Lengths:
        """Return the tokens of each pair's prompt, and of its longer completion and end."""
        return pair_lengths(self._data, model, examples)

    def weights(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> Array:
        """Return minus the derivative of the user's mean loss by each log-probability, ``[rows]``.

        It depends on the user's own pairs and the model alone.
        """
        gained = log_ratio_to_base(model, encoded, batch_size).sum(1)
        shares = self._shares(encoded)
        _, slopes = self._of_pairs(gained * shares)
        pairs = np.bincount(encoded.user, minlength=encoded.users)[encoded.user] / 2
        signed: Array = np.stack([slopes, -slopes], 1).ravel() * shares / pairs
        return signed

    def losses(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> list[Array]:
        """Return the loss of each pair and TRL's metrics of it, ``[pairs]`` each.

        These are the implicit rewards β log π/π_ref of both completions, their difference, and 1
        where the chosen one's is higher.
        """
        gained = log_ratio_to_base(model, encoded, batch_size).sum(1)
        loss, _ = self._of_pairs(gained * self._shares(encoded))
        chosen, rejected = self._update.beta * gained[0::2], self._update.beta * gained[1::2]
        margins = chosen - rejected
        return [loss, chosen, rejected, margins, (margins > 0).astype(np.float64)]

    def _shares(self, encoded: Responses) -> Array:
        """Return the factor of each row's sum over tokens, ``[rows]``: 1/tokens for IPO, else 1."""
        if self._update.loss_type != "ipo":
            return np.ones(len(encoded.user))
        tokens = encoded.response_mask.sum(1).numpy()
        shares: Array = 1.0 / np.maximum(tokens, 1)
        return shares

    def _of_pairs(self, gained: Array) -> tuple[Array, Array]:
        """Return the loss of each pair, and minus its derivative by the margin, ``[pairs]`` each.

        Args:
            gained: Δ of both completions of each pair, in nats, ``[rows]``.
        """
        margins, beta = gained[0::2] - gained[1::2], self._update.beta
        losses: Array
        slopes: Array
        if self._update.loss_type == "hinge":
            losses = np.maximum(0.0, 1 - beta * margins)
            slopes = np.where(beta * margins < 1, beta, 0.0)
        elif self._update.loss_type == "ipo":
            losses = (margins - 1 / (2 * beta)) ** 2
            slopes = 1 / beta - 2 * margins
        else:
            losses = np.logaddexp(0, -beta * margins)
            slopes = beta * np.exp(-np.logaddexp(0, beta * margins))
        # A margin that is no number makes its user's gradient zero, also where a branch hides it.
        return losses, np.where(np.isfinite(margins), slopes, np.nan)


def encode_pairs(data: PreferencePairs, model: CausalLMPolicy, examples: Prompts) -> Responses:
    """Return two rows of tokens for each pair: the chosen completion, then the rejected one.

    As in TRL, the end-of-sequence token is learnt after a text, and a conversation ends as its
    template says.
    """
    most, length = data.widths
    both, answers = [], []
    for prompt, pair in _rows(data, model, examples):
        both += [prompt[-most:]] * len(pair)
        answers += [tokens[:length] for tokens in pair]
    return pack(model, examples, both, answers, length, most)


def pair_lengths(data: PreferencePairs, model: CausalLMPolicy, examples: Prompts) -> Lengths:
    """Return the tokens of each pair's prompt, and of its longer completion and end."""
    return lengths_of((p, max(pair, key=len)) for p, pair in _rows(data, model, examples))


def _rows(
    data: PreferencePairs, model: CausalLMPolicy, examples: Prompts
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Yield the tokens of each pair's prompt, and of its completions with their ends, uncut."""
    rejected = examples.columns[data.rejected_column]
    given: Sequence[Any] = examples.prompts
    if data.implicit_prompt:
        pairs = [split_prompt(c, r) for c, r in zip(given, rejected, strict=True)]
    else:
        pairs = list(zip(given, examples.columns[data.chosen_column], rejected, strict=True))
    for (prompt, *answers), row in zip(pairs, examples.for_template, strict=True):
        before, learnt = split_row(model, prompt, answers, row)
        for answer, tokens in zip(answers, learnt, strict=True):
            tokens += [end_token(model)] if isinstance(answer, str) else []
        yield before, learnt


def split_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected of completions that both begin with their prompt.

    The prompt is the longest common start, in letters or in messages; a space at its end belongs to
    the completions (``trl.extract_prompt``).
    """
    same = in_common(chosen, rejected)
    if isinstance(chosen, str) and chosen[:same].endswith(" "):
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]
