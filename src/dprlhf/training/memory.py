"""What a run needs of a device's memory, by the model's configuration: no weight is loaded.

The model is made on torch's device "meta", whose tensors have sizes and no values, with the
recipe's adapter. Reward models and the directions of a subspace are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dprlhf import recipe
from dprlhf.assets import resolve
from dprlhf.hub import check_reachable, pinned
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.head_logprobs import MOST_LOGITS, head_logprobs
from dprlhf.policies.loading import loading, make_policy
from dprlhf.rollout.decoding import bytes_per_row

USED = 0.9
"""Share of a device's memory that is planned for; the rest is for fragments and CUDA itself."""

PASSES = 1.5
"""What a forward and backward pass take at once, over what is kept: measured on a CPU
(docs/results/places.json)."""

_OF_QUANTISED = {
    "int8": 1.0,
    "fp4": 0.5625,
    "nf4": 0.5625,
    "fp4-double": 0.516,
    "nf4-double": 0.516,
}
"""Bytes of a quantised weight with its scale: blocks of 64, QLoRA's (arXiv 2305.14314)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on a device: frozen weights, what is trained, logits, and those of one response."""

    dimension: int  # Trained parameters
    weights: int
    trained: int
    logits: int
    sampled_response: int
    updated_response: int

    def fitting(self, device_bytes: float) -> dict[str, int]:
        """Return the largest batch sizes that fit, powers of two; 0 for none."""
        free = USED * device_bytes - self.weights - self.trained - self.logits
        of_row = {
            "rollout.batch_size": self.sampled_response,
            "update.batch_size": self.updated_response,
        }
        counts = {key: max(0, int(free // size)) for key, size in of_row.items()}
        return {key: 1 << count.bit_length() >> 1 for key, count in counts.items()}


def memory_of(settings: recipe.Recipe) -> Memory:
    """Return what a recipe's model, adapter and lengths need; without a dtype, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.pytorch_utils import Conv1D

    spec, rollout = settings.policy, settings.rollout
    dtype = torch.bfloat16 if spec.dtype == "auto" else getattr(torch, spec.dtype)
    name = resolve(spec.model_name_or_path)
    of_hub: dict[str, Any] = {
        "trust_remote_code": spec.trust_remote_code,
        **pinned(spec.model_name_or_path, spec.revision, "policy.revision"),
    }
    check_reachable(spec.model_name_or_path, spec.revision, "policy.model_name_or_path")
    with loading(spec):
        config = AutoConfig.from_pretrained(name, **of_hub)
        tokenizer = AutoTokenizer.from_pretrained(name, **of_hub)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=spec.trust_remote_code
        )
    policy = make_policy(model, tokenizer, spec.adapter, temperature=rollout.temperature)
    prompt, response = settings.data.max_prompt_tokens, rollout.max_new_tokens
    together = policy.shared_rows(rollout.responses, prompt, response)
    tokens = prompt + together * (response - 1) + 1
    kept = _kept_for_backward(policy, tokens, together * response)
    if spec.gradient_checkpointing:  # then one layer's at a time, and each layer's input
        layers = config.get_text_config().num_hidden_layers
        inputs = layers * tokens * config.get_text_config().hidden_size
        kept = kept // layers + inputs * dtype.itemsize
    frozen = [p for n, p in policy.model.named_parameters() if n not in policy.parameters]
    linear = {
        id(module.weight)
        for module in policy.model.modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
        and module is not policy.network.get_output_embeddings()
    }
    of_weight = _OF_QUANTISED.get(spec.quantization or "", 0.0)
    weights = sum(
        int(p.numel() * (of_weight if of_weight and id(p) in linear else p.itemsize))
        for p in frozen
    )
    # A weight in float32, the round's sum in float64, the optimizer's two moments or one.
    of_trained = 4 + 8 + (8 if settings.optimizer.name == "adam" else 4)
    if spec.adapter.type == "full":
        of_trained += 4  # the start of the run, which is the base policy
    return Memory(
        dimension=policy.dimension,
        weights=weights,
        trained=of_trained * policy.dimension,
        logits=2 * MOST_LOGITS * policy.model.get_input_embeddings().weight.itemsize,
        sampled_response=bytes_per_row(policy, 1 + prompt + response),
        updated_response=int(PASSES * kept) // together,
    )


def _kept_for_backward(policy: CausalLMPolicy, tokens: int, predicted: int) -> int:
    """Return the bytes that autograd keeps of one row, and those of its attention mask."""
    parameters = {p.untyped_storage()._cdata for p in policy.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # On "meta" torch takes the plain attention, and fused kernels keep no scores.
        if storage._cdata not in parameters and tensor.shape[-2:] != (tokens, tokens):
            kept[storage._cdata] = storage
        return tensor

    ids = torch.ones(1, tokens, dtype=torch.long, device="meta")
    mask = torch.zeros(
        1, 1, tokens, tokens, dtype=policy.model.get_input_embeddings().weight.dtype, device="meta"
    )
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = policy.network.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        head = policy.network.get_output_embeddings()
        head_logprobs(head, states[0, -predicted:], ids[0, -predicted:], policy.temperature)
    return sum(storage.nbytes() for storage in kept.values()) + int(mask.nbytes)
