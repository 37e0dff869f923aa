"""Loads a base model through transformers or takes a given one, and puts the trained part on it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dprlhf import recipe
from dprlhf.errors import DprlhfError, one_line
from dprlhf.hardware import default_torch_state, native_dtype
from dprlhf.hub import check_reachable, pinned
from dprlhf.policies.adapters import INTO_ITSELF, add_adapter
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.refusals import refuse_mixing


@contextlib.contextmanager
def loading(spec: recipe.Policy) -> Iterator[None]:
    """Say on one line what keeps the model of a recipe from being loaded."""
    try:
        yield
    except DprlhfError:
        raise
    except (OSError, ValueError) as error:
        raise DprlhfError(
            f"policy.model_name_or_path {spec.model_name_or_path!r}: {one_line(error)}"
        ) from error


@default_torch_state()
def load_policy(
    spec: recipe.Policy,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    model: Any = None,
    tokenizer: Any = None,
) -> CausalLMPolicy:
    """Load a base model through transformers and put a new adapter on it."""
    if model is None and spec.model_name_or_path == recipe.IN_MEMORY:
        raise DprlhfError("this run's model was given in Python: continue it there, with the model")
    if model is not None or tokenizer is not None:
        from dprlhf.policies.given import check_given

        check_given(model, tokenizer, whole=spec.adapter.type == "full")
    if model is None:
        check_reachable(spec.model_name_or_path, spec.revision, "policy.model_name_or_path")
    given = model is not None
    with loading(spec):
        if tokenizer is None:
            from transformers import AutoTokenizer

            from dprlhf.assets import resolve

            name = spec.model_name_or_path if model is None else model.config._name_or_path
            tokenizer = AutoTokenizer.from_pretrained(
                resolve(name),
                trust_remote_code=spec.trust_remote_code,
                padding_side="left",
                **pinned(name, spec.revision, "policy.revision"),
            )
        if model is None:
            model = _base_of(spec)
    given_init = (spec.adapter.peft or {}).get("init_lora_weights")
    if given and given_init in INTO_ITSELF:
        raise DprlhfError(
            f"policy.adapter.peft: init_lora_weights {given_init} changes the base weights, and the"
            " model was given in Python: name its folder or hub id"
        )
    policy = make_policy(model, tokenizer, spec.adapter, temperature=temperature, seed=seed)
    if spec.gradient_checkpointing:
        policy.checkpoint_layers()
    if spec.adapter.type != "full":
        policy.model.peft_config["default"].revision = spec.revision  # stored with the adapter
    policy.chat_template_kwargs = spec.chat_template_kwargs
    return policy


def _base_of(spec: recipe.Policy) -> Any:
    """Load the base model."""
    from transformers import AutoModelForCausalLM

    from dprlhf.assets import resolve

    settings: dict[str, Any] = pinned(spec.model_name_or_path, spec.revision, "policy.revision")
    dtype = native_dtype() if spec.dtype == "auto" else getattr(torch, spec.dtype)
    if spec.quantization is not None:
        from dprlhf.policies.given import quantization_config

        settings["quantization_config"] = quantization_config(spec.quantization, dtype)
    model, loading = AutoModelForCausalLM.from_pretrained(
        resolve(spec.model_name_or_path),
        dtype=dtype,
        attn_implementation=spec.attn_implementation,
        trust_remote_code=spec.trust_remote_code,
        output_loading_info=True,
        **settings,
    )
    lacking = sorted(loading["missing_keys"] & {name for name, _ in model.named_parameters()})
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise DprlhfError(
            f"policy.model_name_or_path {spec.model_name_or_path!r}: the checkpoint has no weights"
            f" for {lacking[0]}{more}, which would be random: is it a causal language model's?"
        )
    return model


def make_policy(
    model: Any,
    tokenizer: Any,
    adapter: recipe.Adapter,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> CausalLMPolicy:
    """Put a new adapter on a loaded transformers model, and prepare its tokenizer."""
    # bitsandbytes packs 4-bit weights on a CPU at the first pass in evaluation mode; what it then
    # calls has no gradient: that of the layers below would silently be missing.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    choose_padding(tokenizer, model.get_input_embeddings().weight.shape[0])
    tokenizer.padding_side = "left"
    refuse_mixing(model, alone=True)  # before PEFT says what such a model has no default for
    if adapter.type == "full":
        from dprlhf.policies.whole import WholePolicy

        return WholePolicy(model, tokenizer, temperature)
    adapted = add_adapter(model, adapter, seed=seed)
    return CausalLMPolicy(adapted, tokenizer, temperature)


def choose_padding(tokenizer: Any, vocabulary: int) -> None:
    """Give a tokenizer a padding token that the model has an embedding for."""
    # One that was added to the tokenizer alone has none. Padding is masked: any special token does.
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id < vocabulary:
        return
    for token in (tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token):
        if token is not None and tokenizer.convert_tokens_to_ids(token) < vocabulary:
            tokenizer.pad_token = token
            return
    raise DprlhfError(
        "the tokenizer has no padding token that the model knows, and no end-of-sequence token to"
        " use in its place: set tokenizer.eos_token"
    )


def without_wrapper(model: Any) -> Any:
    """Return the model inside ``DataParallel`` or Opacus' ``GradSampleModule``, or the model."""
    # Opacus' hooks would keep a gradient of each row in memory.
    if isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    if not hasattr(model, "to_standard_module"):
        return model
    print(
        "dprlhf: the model comes wrapped by Opacus: if it was trained on rows of users, save it,"
        " declare that with dprlhf privacy declare, and name its folder under previous",
        file=sys.stderr,
    )
    return model.to_standard_module()
