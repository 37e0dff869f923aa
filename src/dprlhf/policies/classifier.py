"""A sequence classifier with a trainable adapter and head: the reward model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from dprlhf import recipe
from dprlhf.errors import DprlhfError, one_line
from dprlhf.hub import check_reachable, pinned
from dprlhf.policies.adapters import add_adapter
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.kept import Replay


class RewardModel(CausalLMPolicy):
    """A classifier as a policy that answers a text with one token, the number of a label.

    The code that clips and sums the gradients of log π then serves reward models too: a row is a
    text and its answer. A model with one output has no labels; its "log-probability" is the score.
    """

    def response_logprobs(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        responses: int,
        shared_rows: int = 1,
        replay: Replay | None = None,
    ) -> torch.Tensor:
        """Return log p(label | text), or the score of a model with one output.

        Args:
            tokens: ``[rows, text + 1]``, texts padded on the left, then the label.
            mask: 1 for real tokens and 0 for padding, same shape.
            responses: Always 1.
            shared_rows: Always 1; texts share no prompt.
            replay: Always None; nothing is sampled.

        Returns:
            ``[rows, 1]``, float32 or wider.
        """
        text, seen = tokens[:, :-1], mask[:, :-1]
        # Encoders number positions from the left: the padding moves to the right.
        width = text.shape[1]
        missing = width - seen.sum(1, keepdim=True)
        order = (torch.arange(width, device=text.device) + missing) % width
        text, seen = text.gather(1, order), seen.gather(1, order)
        text = torch.where(seen.bool(), text, self.tokenizer.pad_token_id)
        # A masked column at the end, without which the attention kernel would depend on who is
        # there (see dprlhf.rollout).
        text = F.pad(text, (0, 1), value=self.tokenizer.pad_token_id)
        placed = {}
        room = positions(self.model)
        if width + 1 > room:  # the masked column has no position of its own; any will do
            places = torch.arange(width + 1, device=text.device).clamp(max=room - 1)
            placed = {"position_ids": places.expand_as(text)}
        logits = self.model(input_ids=text, attention_mask=F.pad(seen, (0, 1)), **placed).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if logits.shape[1] > 1:
            logits = logits.log_softmax(1).gather(1, tokens[:, -1:])
        scores: torch.Tensor = logits
        return scores


def positions(model: nn.Module) -> float:
    """Return the number of positions that a model has; infinite where it states none."""
    config = getattr(model, "config", None)
    if config is None:
        return math.inf
    return getattr(config.get_text_config(), "max_position_embeddings", math.inf)


def load_reward_model(
    spec: recipe.Policy, labels: list[str] | None, *, seed: int = 0
) -> RewardModel:
    """Load an encoder or a causal LM through transformers with a classification head.

    Args:
        spec: The recipe's section.
        labels: Names of the labels; None for the one output of a reward trained on pairs.
        seed: Seed of a new head's and the adapter's initial weights, which are public.

    Raises:
        DprlhfError: The model cannot be loaded, or the adapter does not fit it.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from dprlhf.assets import resolve

    path = resolve(spec.model_name_or_path)
    check_reachable(spec.model_name_or_path, spec.revision, "model.model_name_or_path")
    revision = pinned(spec.model_name_or_path, spec.revision, "model.revision")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=spec.trust_remote_code, **revision
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype=torch.float32,
                attn_implementation=spec.attn_implementation,
                trust_remote_code=spec.trust_remote_code,
                ignore_mismatched_sizes=True,
                **head_settings(labels),
                **revision,
            )
    except (OSError, ValueError) as error:
        raise DprlhfError(
            f"model.model_name_or_path {spec.model_name_or_path!r}: {one_line(error)}"
        ) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.truncation_side = "left" if labels is None else "right"
    model.config.pad_token_id = tokenizer.pad_token_id  # decoders find a text's last token by it
    adapted = add_adapter(model, spec.adapter, seed=seed, task_type="SEQ_CLS")
    adapted.peft_config["default"].revision = spec.revision  # stored with the adapter
    made = RewardModel(adapted, tokenizer)
    made.chat_template_kwargs = spec.chat_template_kwargs
    return made


def head_settings(labels: list[str] | None) -> dict[str, object]:
    """Return the arguments of ``from_pretrained`` for the classification head.

    Args:
        labels: Names of the labels; None for one output.
    """
    if labels is None:
        return {"num_labels": 1}
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {name: number for number, name in enumerate(labels)},
    }
