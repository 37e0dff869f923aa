"""A tiny random model of each family of transformers' causal language models."""

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from dprlhf import recipe
from dprlhf.gradients.micro_batches import user_gradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import make_policy
from dprlhf.rollout.decoding import decode
from helpers import tiny
from helpers.autograd import gradient_of_user
from helpers.batches import Shape, batch_of

_HALVES = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {"state_size": 4, "time_step_rank": 4, "expand": 2, "conv_kernel": 4}
_NO_CROSS = {"is_decoder": True, "add_cross_attention": False}

FAMILIES: dict[str, dict[str, Any]] = {
    # full attention
    "gpt2": {}, "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {},
    "gemma": {}, "olmo": {}, "olmo2": {}, "phi": {}, "phi3": {}, "granite": {}, "stablelm": {},
    "glm": {"partial_rotary_factor": 0.5}, "glm4": {"partial_rotary_factor": 0.5}, "cohere": {},
    "smollm3": {}, "nemotron": {}, "helium": {}, "seed_oss": {}, "arcee": {}, "apertus": {},
    "persimmon": {}, "ernie4_5": {}, "hunyuan_v1_dense": {}, "bitnet": {}, "nanochat": {},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4,
        "window_size": 8,
    },
    "gpt_neox": {}, "gptj": {"rotary_dim": 4}, "codegen": {"rotary_dim": 4},
    "gpt_bigcode": {}, "falcon": {"head_dim": ...}, "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "biogpt": {},
    "xglm": {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 64},
    "openai-gpt": {"n_positions": 64}, "ctrl": {"dff": 64, "n_positions": 64},
    "bert": _NO_CROSS, "roberta": _NO_CROSS, "electra": {**_NO_CROSS, "embedding_size": 32},
    # windows
    "mistral-window": {"sliding_window": 8},
    "qwen2-window": {**_HALVES, "use_sliding_window": True},
    "phi3-window": {"sliding_window": 8}, "gemma2": _HALVES, "gemma3_text": _HALVES,
    "cohere2": _HALVES, "olmo3": _HALVES, "exaone4": _HALVES, "ministral": _HALVES,
    "starcoder2": {"sliding_window": 8}, "modernbert-decoder": {**_HALVES, "local_attention": 8},
    "vaultgemma": _HALVES, "gemma4_text": {**_HALVES, "hidden_size_per_layer_input": 0},
    # chunks, states and convolutions
    "llama4_text": {"attention_chunk_size": 8, "moe_layers": [], "intermediate_size_mlp": 64},
    "mamba": _MAMBA, "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "falcon_mamba": _MAMBA,
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4,
                  "mamba_n_groups": 1, "mamba_chunk_size": 8},
    "jamba": {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 2,
              "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8,
              "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8,
                         "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1,
                         "mamba_chunk_size": 8, "num_local_experts": 0,
                         "shared_intermediate_size": 64},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 4, "n_mamba_heads": 8,
               "mamba_headdim": 8, "mamba_ngroups": 1, "chunk_size": 8, "adapter_rank": 4,
               "attention_head_dim": 16},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3,
                   "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1,
                   "chunk_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"],
                        "sliding_window": ..., "attention_window_size": 8},
    "qwen3_next": {**_LINEAR, "mlp_only_layers": [0, 1], "linear_num_key_heads": 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "num_experts": 0},
    "qwen3_5_text": {**_LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                     "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "olmo_hybrid": {**_LINEAR, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
                    "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    # mixtures of experts
    "mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
"""Settings that make a model of the type tiny, beside those of ``tiny.SMALL``; what follows a
hyphen in a name is a variant, unless transformers has the name."""

_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "depth": 1, "num_heads": 2, "embed_dim": 16,
    "out_hidden_size": 32, "model_type": "",
}  # fmt: skip

COMPOSITE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("siglip_vision_model", {**_HALVES, "model_type": "gemma3_text"})
}
"""Models with an image tower: the type of the tower, and settings of the text model."""


def model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of this family, whose next token depends on what stands before it."""
    torch.manual_seed(seed)
    if name in COMPOSITE:
        tower, settings = COMPOSITE[name]
        config = AutoConfig.for_model(
            name, text_config={**tiny.SMALL, **settings, **changes},
            vision_config={**_VISION, "model_type": tower}, mm_tokens_per_image=4,
        )  # fmt: skip
    else:
        kind = name if name in CONFIG_MAPPING_NAMES else name.partition("-")[0]
        settings = {**tiny.SMALL, **FAMILIES[name], **changes}
        config = AutoConfig.for_model(kind, **{k: v for k, v in settings.items() if v is not ...})
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
        made.get_output_embeddings().weight.mul_(2)
    return made.eval()


def policy(name: str, adapter: str = "lora", **changes: Any) -> CausalLMPolicy:
    """A policy of this family, with LoRA's matrices away from zero."""
    settings: dict[str, Any] = {"type": adapter}
    if adapter == "lora":
        settings |= {"rank": 2, "alpha": 4.0, "target_modules": "all-linear"}
    spec = recipe.Adapter.model_validate(settings | changes)
    made = make_policy(model(name), tiny.tokenizer(), spec)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in made.parameters.items():
            if "lora_" in path:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made


PROMPTS = [[5, 9, 33, 77, 2, 8, 61, 30, 12, 99, 140], [7], [100, 101, 102, 103]]
LENGTH, WIDTH = 12, 16


def sampled_logprobs(
    made: CausalLMPolicy, prompts: list[list[int]] = PROMPTS
) -> list[tuple[list[int], torch.Tensor]]:
    """What :func:`decode` draws after each prompt, and the log-probabilities that it draws by."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand((len(prompts), 1, LENGTH), dtype=torch.float64, generator=generator)
    seen: list[torch.Tensor] = []
    responses = decode(
        made, prompts, draws, width=WIDTH,
        watch=lambda logits: seen.append(logits.float().log_softmax(1)),
    )  # fmt: skip
    return [
        (response, torch.stack([seen[i][row, token] for i, token in enumerate(response)]))
        for row, response in enumerate(responses)
    ]


@torch.no_grad()
def padded_logprobs(made: CausalLMPolicy, responses: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities of responses to ``PROMPTS`` as the gradient pass computes them."""
    tokens = torch.zeros(len(responses), WIDTH + LENGTH, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
        columns = slice(WIDTH - len(prompt), WIDTH + len(response))
        tokens[row, columns], mask[row, columns] = torch.tensor(prompt + response), 1
    found = made.response_logprobs(tokens, mask, LENGTH)
    return [row[: len(response)] for row, response in zip(found, responses, strict=True)]


@torch.no_grad()
def plain_logprobs(made: CausalLMPolicy, prompt: list[int], response: list[int]) -> torch.Tensor:
    """The ground truth: the model on one sequence, with neither padding nor a cache."""
    logits = made.model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    logprobs = logits[len(prompt) - 1 : -1].float().log_softmax(1)
    return logprobs[torch.arange(len(response)), response]


def gradients(made: CausalLMPolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """Each user's gradient as a run computes it, and by autograd on one row after the other."""
    responses = batch_of(Shape([[5, 9], [1]], k=2, length=6), seed=3, copies=1)
    weights = np.cos(np.arange(len(responses.user)))
    found = torch.zeros(2, made.dimension, dtype=torch.float64)
    for users, _, of_users, _ in user_gradients(made, responses, weights, batch_size=4, rows=None):
        found[users[users >= 0]] = of_users[users >= 0, 0].double()
    truth = [gradient_of_user(made, responses, weights, user) for user in range(2)]
    return found, torch.stack(truth)
