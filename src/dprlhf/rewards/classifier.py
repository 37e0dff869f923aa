"""A sequence classifier as a reward: the log-odds of one label."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dprlhf.assets import resolve
from dprlhf.data.messages import template_arguments, text_of
from dprlhf.errors import DprlhfError
from dprlhf.hardware import to_device
from dprlhf.hub import check_reachable, split_revision
from dprlhf.policies.causal_lm import context_length, first_position
from dprlhf.policies.refusals import mixing_layers, refuse_foreign_hooks
from dprlhf.rewards.reward import suggestion, type_and_message

Text = Literal["prompt+completion", "completion"]


_WIDTHS = (8, 16, 24, 32)
_WIDTH_STEP = 16  # beyond these


class ClassifierReward:
    """Score texts with a frozen sequence classifier, in float32.

    With several labels the score of a text is the chosen label's logit minus the logsumexp of the
    other labels' logits: the log-odds of the label under the softmax, and with two labels the
    difference of the logits. With one output the score is that output.

    The text of a plain prompt is prompt + completion, without a separator. Messages go through
    the tokenizer's chat template if it has one, else their contents are joined by line breaks.
    A text that is too long is truncated at its end if it is the completion alone, and otherwise at
    its start, since the completion comes last.
    """

    dprlhf_by_place = True

    def __init__(
        self,
        source: Any,
        *,
        tokenizer: Any = None,
        label: str | None = None,
        max_tokens: int = 32768,
        batch_size: int = 32,
        text: Text = "prompt+completion",
        device: str | torch.device = "cpu",
    ) -> None:
        """Load the classifier.

        Args:
            source: Hub id, folder, ``"asset:NAME"`` for an asset of this package, or a sequence
                classifier as an object. An object keeps its dtype; it is moved to the device,
                frozen and set to evaluate.
            tokenizer: Its tokenizer, of which a copy is used; None loads the one beside the model,
                for an object that of ``model.config.name_or_path``.
            label: Label to reward; required with two or more labels.
            max_tokens: Longest text in tokens, or the model's own limit if that is less.
            text: Whether to read the prompt and the completion, or the completion alone.

        Raises:
            DprlhfError: the source cannot be loaded, has no trained classification head, or does
                not have the label; or ``text`` is another word.
        """
        if isinstance(source, str):
            model, self._tokenizer = _loaded(source, tokenizer)
        else:
            model, self._tokenizer = _taken(source, tokenizer)
            source = _name_of(model)
        self.__name__ = source
        # A mixture of experts couples the texts of a batch.
        self.dprlhf_per_user = any(mixing_layers(model))
        labels = [str(model.config.id2label[i]) for i in range(model.config.num_labels)]
        if label is None and len(labels) == 1:
            self._label = None
        else:
            if label is None:
                raise DprlhfError(
                    f"classifier {source!r} has {len(labels)} labels ({', '.join(labels)}): "
                    "say in `label` which one to reward"
                )
            if label not in labels:
                raise DprlhfError(
                    f"classifier {source!r} has no label {label!r}; "
                    + suggestion(label, labels, "its labels")
                )
            self._label = labels.index(label) if len(labels) > 1 else None
        if text not in get_args(Text):
            raise DprlhfError(
                f"classifier {source!r}: it cannot read the text {text!r}; "
                + suggestion(text, get_args(Text), "what it can read")
            )
        self._text = text
        self._batch_size = batch_size
        self._tokenizer.truncation_side = "right" if text == "completion" else "left"
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token_id is None:
            raise DprlhfError(f"classifier {source!r}: its tokenizer has no padding token")
        # Decoders find a text's last token by it.
        model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        self._room = context_length(model.config, first_position(model))
        room = min(self._tokenizer.model_max_length, self._room)
        self._max_tokens = int(min(max_tokens, room))
        self.model: Any = model.eval().requires_grad_(False)
        # Loaders place quantized and dispatched models, which refuse to be moved.
        if not (getattr(model, "is_quantized", False) or getattr(model, "hf_device_map", None)):
            self.model = model.to(device)
        self._device = next(model.parameters()).device

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        places: Sequence[int] | None = None,
        **_: object,
    ) -> list[float | None]:
        """Return the scores ``[rows]`` of completions, which are texts or lists of messages.

        A text is in a batch of its own padded width, at its own place, so that no other text
        changes how it is rounded (see :mod:`dprlhf.rollout`). Without places, texts of one width
        stand one after the other.
        """
        tokens = self._tokens(prompts, completions)
        scores: list[float | None] = [None] * len(tokens)
        batches: dict[tuple[int, int], list[int]] = {}
        of_width: Counter[int] = Counter()
        for i, ids in enumerate(tokens):
            # A model has no positions for padding beyond its longest text.
            width = min(_width(len(ids)), self._max_tokens)
            number, place = divmod(
                of_width[width] if places is None else places[i], self._batch_size
            )
            of_width[width] += 1
            batches.setdefault((number, width), [-1] * self._batch_size)[place] = i
        for (_number, width), rows in batches.items():
            of_batch = self._forward([None if i < 0 else tokens[i] for i in rows], width)
            for i, score in zip(rows, of_batch, strict=True):
                if i >= 0:
                    scores[i] = score
        return scores

    def _tokens(self, prompts: list[Any], completions: list[Any]) -> list[list[int]]:
        """Return the tokens of texts, all of which the model has an embedding for.

        On a GPU any other ends the process, as in :meth:`CausalLMPolicy.known`; an exception here
        costs the row's user alone.
        """
        tokens = classifier_tokens(
            self._tokenizer,
            prompts,
            completions,
            whole=self._text == "prompt+completion",
            max_tokens=self._max_tokens,
        )
        rows = _embeddings(self.model)
        if max([self._tokenizer.pad_token_id, *map(max, tokens)]) >= rows:
            raise DprlhfError(
                f"the classifier's tokenizer has tokens beyond the {rows} that the model has"
                " embeddings for, and a text or its padding has one of them"
            )
        return tokens

    @torch.inference_mode()
    def _forward(self, batch: list[list[int] | None], width: int) -> list[float]:
        columns, placed = self._columns(width)
        input_ids = torch.full((self._batch_size, columns), self._tokenizer.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for i, ids in enumerate(batch):
            if ids is None:  # a filler
                attention_mask[i, :width] = 1
                continue
            input_ids[i, : len(ids)] = torch.tensor(ids)
            attention_mask[i, : len(ids)] = 1
        logits = self.model(
            input_ids=to_device(input_ids, self._device),
            attention_mask=to_device(attention_mask, self._device),
            **placed,
        ).logits
        logits = logits.cpu().double()  # MPS has no float64
        if self._label is None:
            scores = logits[:, 0]
        else:
            others = [j for j in range(logits.shape[1]) if j != self._label]
            scores = logits[:, self._label] - logits[:, others].logsumexp(dim=1)
        return [float(score) for score in scores.tolist()]

    def _columns(self, width: int) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the number of columns for texts of a width, and the arguments that place them.

        Where no column of a batch is masked, fused attention takes another kernel, which may round
        differently: a shorter text of one user would change how those of others are computed. So
        there is a masked column behind the texts. Where the model has no position for it and takes
        no other one's, there is none.
        """
        if getattr(self.model.config, "_attn_implementation", "eager") == "eager":
            return width, {}
        if width < self._room:
            return width + 1, {}
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            return width, {}
        places = first_position(self.model) + torch.arange(width + 1).clamp(max=width - 1)
        placed = places.expand(self._batch_size, -1)
        return width + 1, {"position_ids": to_device(placed, self._device)}


def _embeddings(model: Any) -> float:
    """Return the number of tokens that a model has embeddings for.

    It is infinite where there is no table of them: CANINE hashes characters.
    """
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:
        return math.inf
    return int(table.weight.shape[0])


def _width(tokens: int) -> int:
    """Return the padded width of a text, which its own length decides."""
    wide = -(-tokens // _WIDTH_STEP) * _WIDTH_STEP
    return next((width for width in _WIDTHS if tokens <= width), wide)


def _loaded(source: str, tokenizer: Any) -> tuple[Any, Any]:
    """Load model and tokenizer by their name; all weights, the head's too, must be there."""
    name, revision = split_revision(source)
    place = resolve(name)
    check_reachable(name, revision, "classifier")
    try:
        own = copy.deepcopy(tokenizer) or AutoTokenizer.from_pretrained(place, revision=revision)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            place, dtype=torch.float32, output_loading_info=True, revision=revision
        )
    except Exception as problem:
        raise DprlhfError(
            f"classifier {source!r} cannot be loaded: {type_and_message(problem)}"
        ) from problem
    if loading["missing_keys"]:
        raise DprlhfError(
            f"classifier {source!r} has no trained weights for "
            f"{', '.join(sorted(loading['missing_keys']))}: name a fine-tuned classifier"
        )
    model.dprlhf_loaded_from = (name, revision)  # where a record of a private run may be
    return model, own


def _taken(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Check a model object, and return it with a copy of its tokenizer."""
    refuse_foreign_hooks(model, f"reward {_name_of(model)!r}")
    can_generate = getattr(model, "can_generate", None)
    if can_generate is not None and can_generate():
        raise DprlhfError(
            f"reward {_name_of(model)!r} is a {type(model).__name__}, which writes texts: a reward"
            " model is a sequence classifier (AutoModelForSequenceClassification)"
        )
    if getattr(model, "peft_config", None):
        raise DprlhfError(
            f"reward {_name_of(model)!r}: an adapter in memory does not say which run tuned it, and"
            " what that cost its users: give the folder or hub id of the adapter, or of the merged"
            " model, in place of the object"
        )
    if tokenizer is not None:
        return model, copy.deepcopy(tokenizer)
    place = str(getattr(model.config, "name_or_path", "") or "")
    try:
        return model, AutoTokenizer.from_pretrained(place)
    except Exception as problem:
        raise DprlhfError(
            f"reward model {_name_of(model)!r}: its tokenizer cannot be loaded from {place!r}"
            f" ({type_and_message(problem)}): give it as reward_processing_classes"
        ) from problem


def _name_of(model: Any) -> str:
    """Return the last part of a model's hub id or folder, as TRL does; else its class."""
    place = str(getattr(model.config, "name_or_path", "") or "").rstrip("/")
    return place.rsplit("/")[-1] or type(model).__name__


def classifier_tokens(
    tokenizer: Any,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    whole: bool,
    max_tokens: int,
    for_template: Sequence[Mapping[str, Any]] | None = None,
) -> list[list[int]]:
    """Tokenize texts as a classifier reads them; an empty text becomes one padding token.

    Args:
        tokenizer: Tokenizer; its ``truncation_side`` is the end at which long texts are cut.
        prompts: Texts or conversations, ``[rows]``.
        completions: Texts or lists of messages, ``[rows]``.
        whole: Whether to read the prompt too, not the completion alone.
        for_template: What each row of data has for the chat template
            (:func:`~dprlhf.data.messages.template_arguments`); None for nothing.
    """
    # Row by row: a column of mixed rows would otherwise be read by what other users have there.
    template = whole and tokenizer.chat_template is not None
    templated = [template and not isinstance(completion, str) for completion in completions]
    texts: list[str] = []
    own = [{}] * len(completions) if for_template is None else for_template
    parts = zip(prompts, completions, templated, own, strict=True)
    for prompt, completion, by_template, of_row in parts:
        if by_template:
            given, arguments = [*prompt, *completion], template_arguments(of_row)
            texts.append(tokenizer.apply_chat_template(given, tokenize=False, **arguments))
        elif whole and isinstance(completion, str):
            texts.append(prompt + completion)
        else:
            texts.append(text_of([prompt, completion] if whole else completion))
    tokens: list[list[int]] = [[] for _ in texts]
    for kind in set(templated):
        rows = [row for row, by_template in enumerate(templated) if by_template == kind]
        encoded = tokenizer(
            [texts[row] for row in rows],
            add_special_tokens=not kind,  # the template writes its own
            padding=False,  # some tokenizer files ask for it, and it would not be masked
            truncation=True,
            max_length=max_tokens,
        )
        for row, ids in zip(rows, encoded["input_ids"], strict=True):
            # Without special tokens an empty text has no token at all, which no model can read.
            tokens[row] = ids or [tokenizer.pad_token_id]
    return tokens
