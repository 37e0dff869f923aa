"""A sequence classifier with a trainable adapter and head: the reward model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dprlhf import recipe
from dprlhf.errors import DprlhfError
from dprlhf.hardware import forked_rng
from dprlhf.hub import check_reachable, pinned
from dprlhf.policies.adapters import add_adapter
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.kept import Replay
from dprlhf.policies.loading import choose_padding, loading


class RewardModel(CausalLMPolicy):
    """A classifier as a policy that answers a text with one token, the number of a label.

    The code that clips and sums the gradients of log π then serves reward models too: a row is a
    text and its answer. A model with one output has no labels; its "log-probability" is the score.
    """

    def response_logprobs(
        self,
        tokens: torch.Tensor,  # [rows, text + 1], texts padded on the left, then the label
        mask: torch.Tensor,
        responses: int,
        shared_rows: int = 1,
        replay: Replay | None = None,
    ) -> torch.Tensor:
        """Return log p(label | text), or the score of a model with one output."""
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
        if width + 1 > self.room:  # the masked column has no position of its own; any will do
            places = torch.arange(width + 1, device=text.device).clamp(max=int(self.room) - 1)
            placed = {"position_ids": (self.first_position + places).expand_as(text)}
        logits = self.model(input_ids=text, attention_mask=F.pad(seen, (0, 1)), **placed).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if logits.shape[1] > 1:
            logits = logits.log_softmax(1).gather(1, tokens[:, -1:])
        scores: torch.Tensor = logits
        return scores


def load_reward_model(
    spec: recipe.Policy, labels: list[str] | None, *, seed: int = 0
) -> RewardModel:
    """Load an encoder or a causal LM through transformers with a classification head."""
    # A base may lack more than the head, such as a pooler. Its weights are random, not trained, get
    # no adapter, and are saved all the same: a base loaded anew would have other ones.
    from transformers import AutoTokenizer

    from dprlhf.assets import resolve

    check_reachable(spec.model_name_or_path, spec.revision, "policy.model_name_or_path")
    revision = pinned(spec.model_name_or_path, spec.revision, "model.revision")
    with loading(spec):
        tokenizer = AutoTokenizer.from_pretrained(
            resolve(spec.model_name_or_path), trust_remote_code=spec.trust_remote_code, **revision
        )
        model, new = load_classifier(spec, labels, seed=seed, attention=spec.attn_implementation)
    choose_padding(tokenizer, model.get_input_embeddings().weight.shape[0])
    tokenizer.truncation_side = "left" if labels is None else "right"
    # Decoders find a text's last token by it.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    adapted = add_adapter(model, spec.adapter, seed=seed, task_type="SEQ_CLS")
    _save_with_adapter(adapted, new)
    adapted.peft_config["default"].revision = spec.revision  # stored with the adapter
    made = RewardModel(adapted, tokenizer)
    made.chat_template_kwargs = spec.chat_template_kwargs
    return made


def load_classifier(
    spec: recipe.Policy, labels: list[str] | None, *, seed: int, attention: str | None = None
) -> tuple[Any, list[str]]:
    """Load a base model in float32 with a classification head, as it is before it is trained."""
    # What the checkpoint lacks has the same random weights at each call, so that a trained adapter
    # can be merged into the base that it was trained on.
    from transformers import AutoModelForSequenceClassification

    from dprlhf.assets import resolve

    head: dict[str, Any] = {"num_labels": 1}
    if labels is not None:
        head = {
            "id2label": dict(enumerate(labels)),
            "label2id": {n: i for i, n in enumerate(labels)},
        }
        head["num_labels"] = len(labels)
    with forked_rng():
        torch.manual_seed(seed)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            resolve(spec.model_name_or_path),
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=spec.trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **head,
            **pinned(spec.model_name_or_path, spec.revision, "model.revision"),
        )
    if model.config.is_encoder_decoder:
        raise DprlhfError(
            f"policy.model_name_or_path {spec.model_name_or_path!r}: an encoder-decoder cannot be a"
            " reward model here: take an encoder, or a causal language model"
        )
    new = {*loading["missing_keys"], *(name for name, *_ in loading["mismatched_keys"])}
    return model, sorted({name.rpartition(".")[0] for name in new})


def _save_with_adapter(adapted: Any, layers: list[str]) -> None:
    """Have layers saved and loaded with an adapter; their weights stay frozen."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    network, config = adapted.get_base_model(), adapted.peft_config["default"]
    for name in layers:
        parts = name.split(".")
        above = [network.get_submodule(".".join(parts[:n])) for n in range(1, len(parts) + 1)]
        if any(isinstance(module, ModulesToSaveWrapper) for module in above):
            continue
        layer: Any = above[-1]
        if isinstance(layer, BaseTunerLayer):  # PEFT does not do both to one layer
            layer = layer.get_base_layer()
        kept = ModulesToSaveWrapper(layer, "default").requires_grad_(False)
        setattr(network.get_submodule(".".join(parts[:-1])), parts[-1], kept)
        config.modules_to_save = [*config.modules_to_save, name]
    if not any(isinstance(module, BaseTunerLayer) for module in network.modules()):
        raise DprlhfError(
            "policy.adapter.target_modules: the base model has no weights for the layers that it"
            f" names ({', '.join(layers)}), so there is nothing to adapt: name others"
        )
