"""Checks of a model and a tokenizer that a program gives in place of the names of a recipe."""

from __future__ import annotations

from typing import Any

from dprlhf.errors import DprlhfError
from dprlhf.policies.refusals import refuse_foreign_hooks


def check_given(model: Any, tokenizer: Any, *, whole: bool) -> None:
    """Refuse objects that no policy can be made of; None stands for what was not given."""
    if hasattr(model, "peft_config"):
        raise DprlhfError(
            "model: it has an adapter already: load the base model afresh, as to continue a run;"
            " or merge it (merge_and_unload()) to build on it, and say what to train"
        )
    if isinstance(tokenizer, str):
        raise DprlhfError(
            f"processing_class={tokenizer!r}: give the tokenizer, such as"
            f" AutoTokenizer.from_pretrained({tokenizer!r}); None takes the model's own"
        )
    if hasattr(tokenizer, "tokenizer"):
        raise DprlhfError("processing_class: prompts are text here: give the processor's tokenizer")
    if tokenizer is not None and not hasattr(tokenizer, "pad_token_id"):
        raise DprlhfError(
            f"processing_class: give a tokenizer of transformers, not a {type(tokenizer).__name__}"
        )
    if model is not None:
        refuse_foreign_hooks(model, "model")
        _check_model(model, whole=whole)
    if model is not None and tokenizer is None and not model.config._name_or_path:
        raise DprlhfError(
            "processing_class: a model that was not loaded from a hub id or a folder does not say"
            " which tokenizer it has: give it"
        )


def _check_model(model: Any, *, whole: bool) -> None:
    """Refuse an object that is no causal language model, is spread over devices, or is frozen."""
    if model.config.is_encoder_decoder or not hasattr(model, "prepare_inputs_for_generation"):
        raise DprlhfError(
            f"model: a {type(model).__name__} is no causal language model: load it with"
            " AutoModelForCausalLM"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise DprlhfError(
            "model: it was made inside torch.inference_mode(), so that it takes no gradients: make"
            " it outside"
        )
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        raise DprlhfError(
            f"model: device_map spread it over {', '.join(sorted(places))}: load it without"
            " device_map; a large one is shared out among GPUs by accelerate launch with"
            " distributed_type: FSDP, or loaded in 4 bit (policy.quantization)"
        )
    if whole:
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        if 0 < len(frozen) < sum(1 for _ in model.parameters()):
            raise DprlhfError(
                f"model: {len(frozen)} of its parameters are frozen ({frozen[0]}, …), and without"
                " an adapter all weights are trained: say what to train with an adapter"
                " (peft_config), or unfreeze them (model.requires_grad_(True))"
            )
