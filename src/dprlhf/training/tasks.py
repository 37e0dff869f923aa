"""The tasks of the supervised stages: next-token prediction, preference pairs, labels.

Each task turns rows of data into tokens and gives every row a weight, so that Σ weight · ∇ log π
over a user's rows is minus the gradient of that user's mean loss. The clipping code, which knows
only weighted log-probabilities, then serves them as it serves policy gradients. A weight depends on
the user's own rows and on the model, never on another user.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.spelling import spelt
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rewards.classifier import classifier_tokens
from dprlhf.rollout import Responses
from dprlhf.rollout.batch import prompt_width, responses_of
from dprlhf.rollout.logprobs import token_logprobs


def check_template(data: recipe.Data, users: Users, policy: CausalLMPolicy) -> None:
    """Check that the tokenizer has a chat template if the data are conversations."""
    # Where a row may be either, the texts are read, and the others one by one are not.
    if users.conversations and not users.mixes_kinds and policy.tokenizer.chat_template is None:
        raise DprlhfError(
            f"data.prompt_column {data.prompt_column!r} holds conversations, and the policy's"
            " tokenizer has no chat template: take an instruction-tuned model, or give text"
        )


def split_row(
    model: CausalLMPolicy,
    prompt: Any,
    completions: Sequence[Any],  # Texts (without an end, which is added later) or messages
    row: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a row's prompt, and of each completion after it.

    Of a conversation, prompt and completion together are what the chat template writes for the
    whole of it, token for token. A template may open more for a response than it keeps of one, such
    as ``<think>``; so the prompt ends where its rendering and that of the whole part (as in TRL).
    Texts are tokenized one after the other.
    """
    messages = prompt if isinstance(prompt, list) else []
    if isinstance(prompt, str) or messages:
        (start,) = model.encode([prompt], sys.maxsize, [row or {}])
    else:
        start = []
    learnt = []
    for completion in completions:
        if completion is None or isinstance(completion, str):
            text = completion or ""
            ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            learnt.append(list(ids))
        elif model.tokenizer.chat_template is None:
            raise DprlhfError(
                "a completion is messages, and the tokenizer has no chat template: take an"
                " instruction-tuned model, or give text"
            )
        else:
            learnt.append(model.render([*messages, *completion], row=row))
    if messages:
        whole = [isinstance(completion, list) for completion in completions]
        ends = [in_common(start, t) for t, w in zip(learnt, whole, strict=True) if w]
        start = start[: min(ends, default=len(start))]
        learnt = [t[len(start) :] if w else t for t, w in zip(learnt, whole, strict=True)]
    start = start or [model.start_token]
    if start == [model.tokenizer.bos_token_id]:
        # An empty prompt is read as the start token. A template writes that, too, at the start of
        # a conversation: the model would learn it after itself.
        learnt = [tokens[1:] if tokens[:1] == start else tokens for tokens in learnt]
    return start, learnt


def in_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many items two sequences begin with that are the same.

    >>> in_common("abcd", "abed")
    2
    """
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(a, b, strict=False)))


def end_token(model: CausalLMPolicy) -> int:
    """Return the token that is learnt at the end of a text."""
    end: int | None = model.tokenizer.eos_token_id
    if end is None:
        raise DprlhfError(
            "the tokenizer has no end-of-sequence token, which is learnt after each text: set"
            " eos_token in the model's tokenizer_config.json"
        )
    model.known([end])
    return end


def ended(model: CausalLMPolicy, completion: Any, tokens: list[int]) -> list[int]:
    """Return the completion's tokens and an end; a template may have written it, and a newline."""
    end = end_token(model)
    by_template = not isinstance(completion, str) and end in tokens[-2:]
    return tokens if by_template else [*tokens, end]


def pack(
    model: CausalLMPolicy,
    examples: Prompts,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    length: int,
    max_prompt_tokens: int,
) -> Responses:
    """Pack prompts, padded on the left, and answers, padded on the right, into rows of tokens."""
    for prompt, answer in zip(prompts, answers, strict=True):
        model.known([*prompt, *answer])
    return responses_of(
        examples,
        len(prompts) // len(examples) if len(examples) else 1,
        prompts,
        answers,
        width=prompt_width(examples, prompts, max_prompt_tokens),
        length=length,
        padding=model.tokenizer.pad_token_id,
    )


Array = NDArray[np.float64]

_WHOLE = 2**30  # tokens of a text that is not to be cut

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
"""The name of a label that a table may hold as a number."""


Lengths = dict[str, list[int]]
"""Tokens of rows before they are cut, ``[rows]``, by the name of the setting that bounds them."""


def lengths_of(rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Lengths:
    """Return the lengths of prompts and completions from the tokens of each row's."""
    both = [(len(prompt), len(completion)) for prompt, completion in rows]
    prompts, completions = ([row[part] for row in both] for part in (0, 1))
    return {"max_prompt_tokens": prompts, "max_completion_tokens": completions}


def are_cut(data: recipe.Data, lengths: Lengths) -> list[bool]:
    """Return for each row of data whether it has more tokens than are kept, ``[rows]``."""
    longer = [np.array(own) > getattr(data, name) for name, own in lengths.items()]
    rows: list[bool] = np.any(longer, axis=0).tolist()
    return rows


class Task(Protocol):
    """A supervised task: the encoding of rows and the weights of their log-probabilities."""

    rows: int  # Number of rows of tokens for one row of data
    metrics: tuple[str, ...]  # Names of the metrics that :meth:`losses` returns

    def encode(self, model: CausalLMPolicy, examples: Prompts) -> Responses:
        """Turn rows of data into rows of tokens, those of a user adjacent."""

    def lengths(self, model: CausalLMPolicy, examples: Prompts) -> Lengths:
        """Return the tokens that each row of data has, by the setting that bounds them."""

    def weights(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> Array:
        """Return the weight of each row's log-probability, ``[rows]``."""

    def losses(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> list[Array]:
        """Return the metrics of PUBLIC examples, an array ``[examples]`` for each metric."""


class NextTokens:
    """Supervised fine-tuning: a document's loss is the mean of −log π over its learnt tokens."""

    rows = 1
    reads_logprobs = False  # by its weights
    metrics: tuple[str, ...] = ("loss",)

    def __init__(self, data: recipe.Documents) -> None:
        self._data = data

    def encode(self, model: CausalLMPolicy, examples: Prompts) -> Responses:
        """Return a row for each document: its prompt, padded on the left, and its learnt tokens.

        The end-of-sequence token is learnt unless the document is truncated. It comes from the
        conversation's template, or is added where that does not end a turn with it.
        """
        width, length = self._data.widths
        prompts, answers = [], []
        for prompt, learnt in self._rows(model, examples):
            prompts.append(prompt[-width:])
            answers.append(learnt[:length])
        return pack(model, examples, prompts, answers, length, width)

    def lengths(self, model: CausalLMPolicy, examples: Prompts) -> Lengths:
        """Return the tokens of each document's prompt, and of its completion and end."""
        return lengths_of(self._rows(model, examples))

    def _rows(
        self, model: CausalLMPolicy, examples: Prompts
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the tokens of each document's prompt, and of what is learnt, uncut."""
        column = self._data.completion_column
        whole = column is None  # the loss is on all of it, after an empty prompt
        given = [""] * len(examples) if whole else examples.prompts
        completions = examples.prompts if column is None else examples.columns[column]
        for prompt, completion, row in zip(given, completions, examples.for_template, strict=True):
            before, (learnt,) = split_row(model, prompt, [completion], row)
            yield before, ended(model, completion, learnt)

    def weights(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> Array:
        """Return 1 / (the user's number of documents × the document's learnt tokens)."""
        tokens = encoded.response_mask.sum(1).numpy()
        of_user = np.bincount(encoded.user, minlength=encoded.users)
        shares: Array = 1.0 / (of_user[encoded.user] * np.maximum(tokens, 1))
        return shares

    def losses(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> list[Array]:
        """Return the loss of each document, ``[documents]``."""
        tokens = np.maximum(encoded.response_mask.sum(1).numpy(), 1)
        return [-token_logprobs(model, encoded, batch_size).sum(1) / tokens]


class Pairs:
    """A reward model from pairs: the loss is −log σ(r(chosen) − r(rejected)) (Bradley–Terry)."""

    rows = 2
    metrics: tuple[str, ...] = ("loss", "accuracy")

    def __init__(self, data: recipe.Preferences) -> None:
        self._data = data

    def encode(self, model: CausalLMPolicy, examples: Prompts) -> Responses:
        """Return two rows for each pair: the chosen one and the rejected one."""
        most = self._data.max_tokens
        both = [tokens for pair in self._texts(model, examples, most) for tokens in pair]
        return pack(model, examples, both, [[0]] * len(both), 1, most)

    def lengths(self, model: CausalLMPolicy, examples: Prompts) -> Lengths:
        """Return the tokens of each pair's longer text."""
        pairs = self._texts(model, examples, _WHOLE)
        return {"max_tokens": [max(map(len, pair)) for pair in pairs]}

    def _texts(
        self, model: CausalLMPolicy, examples: Prompts, most: int
    ) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of each pair's chosen and rejected text."""
        chosen, rejected = (
            classifier_tokens(
                model.tokenizer,
                examples.prompts,
                examples.columns[column],
                whole=True,
                max_tokens=most,
                for_template=examples.for_template,
            )
            for column in self._columns(model, examples)
        )
        return list(zip(chosen, rejected, strict=True))

    def _columns(self, model: CausalLMPolicy, examples: Prompts) -> tuple[str, str]:
        """Return the names of both columns, whose completions have their prompts' form."""
        both = self._data.chosen_column, self._data.rejected_column
        for column in both:
            for prompt, answer in zip(examples.prompts, examples.columns[column], strict=True):
                forms = isinstance(prompt, str), isinstance(answer, str)
                joined = forms == (True, False) and model.tokenizer.chat_template is None
                if forms[0] != forms[1] and not joined:
                    raise DprlhfError(
                        "a prompt and its completion are not of one form: give both as text, or"
                        " both as messages"
                    )
        return both

    def weights(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> Array:
        """Return minus the loss's derivative, ± σ(r(rejected) − r(chosen)) / the user's pairs."""
        slope = 1 - np.exp(-np.logaddexp(0, -_margins(model, encoded, batch_size)))
        pairs = np.bincount(encoded.user, minlength=encoded.users)[encoded.user] / 2
        signed: Array = np.stack([slope, -slope], 1).ravel() / pairs
        return signed

    def losses(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> list[Array]:
        """Return each pair's loss, and 1 where the chosen answer scores higher (½ for a tie)."""
        margins = _margins(model, encoded, batch_size)
        return [np.logaddexp(0, -margins), (np.sign(margins) + 1) / 2]


class Labels:
    """A reward model from labels: the loss is −log p(label | text)."""

    rows = 1
    reads_logprobs = False  # by its weights
    metrics: tuple[str, ...] = ("loss", "accuracy")

    def __init__(self, data: recipe.Preferences, labels: list[str]) -> None:
        self._data = data
        self._labels = labels

    def encode(self, model: CausalLMPolicy, examples: Prompts) -> Responses:
        """Return a row for each text, with the index of its label as the answer."""
        assert self._data.label_column is not None
        given = examples.columns[self._data.label_column]
        texts = self._texts(model, examples, self._data.max_tokens)
        answers = [[self.number(label)] for label in given]
        return pack(model, examples, texts, answers, 1, self._data.max_tokens)

    def lengths(self, model: CausalLMPolicy, examples: Prompts) -> Lengths:
        """Return the tokens of each text."""
        assert self._data.label_column is not None
        for label in examples.columns[self._data.label_column]:
            self.number(label)
        return {"max_tokens": [len(text) for text in self._texts(model, examples, _WHOLE)]}

    def _texts(self, model: CausalLMPolicy, examples: Prompts, most: int) -> list[list[int]]:
        given = examples.prompts
        return classifier_tokens(model.tokenizer, given, given, whole=False, max_tokens=most)

    def number(self, label: Any) -> int:
        """Return the index of a label that is given by its name or its index.

        A CSV file has the name "1" as the number 1, and "true" as a truth value. So where some
        label is named by a number, numbers are names, and none is an index; otherwise a number is
        an index. A truth value is the label of that name, in capitals or not, if there is one.
        """
        if label in self._labels:
            return self._labels.index(label)
        label = spelt(label)
        numbers = {float(name): n for n, name in enumerate(self._labels) if _NUMBER.fullmatch(name)}
        lower = [name.lower() for name in self._labels]
        if isinstance(label, bool) and str(label).lower() in lower:
            return lower.index(str(label).lower())
        if isinstance(label, int | float) and numbers and label in numbers:
            return numbers[label]
        if isinstance(label, int | float) and not numbers and label in range(len(self._labels)):
            return int(label)
        raise DprlhfError(
            f"data.label_column {self._data.label_column!r}: a row has none of the labels"
            f" {', '.join(self._labels)}" + ("" if numbers else " (or their numbers from 0)")
        )

    def weights(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> Array:
        """Return 1 / number of the user's texts, ``[rows]``."""
        of_user = np.bincount(encoded.user, minlength=encoded.users)
        shares: Array = 1.0 / of_user[encoded.user]
        return shares

    def losses(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> list[Array]:
        """Return each text's loss, and 1 where its label is the most likely one."""
        own = encoded.tokens[:, -1].numpy()
        every = np.stack(
            [self._logprobs(model, encoded, n, batch_size) for n in range(len(self._labels))]
        )
        return [-every[own, np.arange(len(own))], (every.argmax(0) == own).astype(np.float64)]

    def _logprobs(
        self, model: CausalLMPolicy, encoded: Responses, label: int, batch_size: int
    ) -> Array:
        tokens = encoded.tokens.clone()
        tokens[:, -1] = label
        asked = Responses(**{**vars(encoded), "tokens": tokens})
        return token_logprobs(model, asked, batch_size)[:, 0]


def _margins(model: CausalLMPolicy, encoded: Responses, batch_size: int) -> Array:
    """Return the margin r(chosen) − r(rejected) of each pair, ``[pairs]``."""
    scores = token_logprobs(model, encoded, batch_size)[:, 0]
    margins: Array = scores[0::2] - scores[1::2]
    return margins
