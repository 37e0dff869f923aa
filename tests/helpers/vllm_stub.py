"""A stand-in for vLLM 0.30.0, with the signatures and checks of what the project calls.

Nothing of vLLM is needed or copied. Read from the wheel of version 0.30.0:

- ``LLM.__init__`` and ``LLM.generate``: ``vllm/entrypoints/llm.py``; what ``__init__`` takes as
  ``**kwargs`` are fields of ``EngineArgs``, ``vllm/engine/arg_utils.py``;
- ``SamplingParams`` and its checks: ``vllm/sampling_params.py``;
- ``LoRARequest``: ``vllm/lora/request.py``; the ranks: ``MaxLoRARanks``, ``vllm/config/lora.py``;
- ``RequestOutput`` and ``CompletionOutput``: ``vllm/outputs.py``;
- ``VLLM_BATCH_INVARIANT`` and the other variables: ``vllm/envs.py``.

An argument that is not here is refused, as an unknown one is by vLLM. To use another one, read it
in the pinned version first. Where vLLM is installed, ``tests/rollout/test_vllm.py`` compares the
names and the defaults with its source.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

VERSION = "0.30.0"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
ENGINE_ARGS = (
    "max_model_len", "enable_lora", "max_loras", "max_lora_rank", "enable_prefix_caching",
    "generation_config", "disable_log_stats", "attention_backend", "async_scheduling",
)  # fmt: skip
"""The arguments of ``LLM`` that are fields of ``EngineArgs``."""


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        assert self.lora_int_id >= 1, "lora_int_id"
        assert self.lora_path, "lora_path"
        # What vLLM reads while it generates: the folder may be gone afterwards.
        self.weights: dict[str, Any] = {}


@dataclass(kw_only=True)
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        assert self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**63), "seed"
        assert type(self.n) is int, "n"
        assert self.n >= 1, "n"
        assert abs(self.presence_penalty) <= 2, "presence_penalty"
        assert abs(self.frequency_penalty) <= 2, "frequency_penalty"
        assert math.isfinite(self.repetition_penalty), "repetition_penalty"
        assert self.repetition_penalty > 0, "repetition_penalty"
        assert 0 <= self.temperature <= 2, "temperature"
        assert not 0 < self.temperature < 0.01, "temperature: vLLM would raise it"
        assert 0 < self.top_p <= 1, "top_p"
        assert type(self.top_k) is int, "top_k"
        assert self.top_k >= -1, "top_k"
        assert 0 <= self.min_p <= 1, "min_p"
        assert self.max_tokens is None or self.max_tokens >= 1, "max_tokens"
        assert self.min_tokens >= 0, "min_tokens"
        assert self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens"
        assert all(type(token) is int for token in self.stop_token_ids or []), "stop_token_ids"


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: Any
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: Any
    outputs: list[CompletionOutput]
    finished: bool


@dataclass
class Call:
    """One call of ``generate``."""

    prompts: list[dict[str, list[int]]]
    settings: list[SamplingParams]
    adapter: LoRARequest | None


@dataclass
class Faults:
    """What is wrong with an engine."""

    couples_requests: bool = False
    couples_logprobs: bool = False
    couples_with_an_adapter: bool = False
    longest: int = 4096
    cuts_short: bool = False
    fails: str = ""
    engines: list[LLM] = field(default_factory=list)


FAULTS = Faults()


class LLM:
    """Answers a request by its tokens, its seed and the adapter; notes what it was asked for."""

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        **kwargs: Any,
    ) -> None:
        unknown = set(kwargs) - set(ENGINE_ARGS)
        if unknown:
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument {unknown}")
        if FAULTS.fails:
            raise ValueError(FAULTS.fails)
        assert isinstance(model, str), "model"
        assert model, "model"
        assert dtype in ("auto", "half", "float16", "bfloat16", "float", "float32"), "dtype"
        assert 0 < gpu_memory_utilization <= 1, "gpu_memory_utilization"
        assert kwargs.get("max_model_len", -1) >= -1, "max_model_len"
        assert kwargs.get("max_lora_rank", 16) in RANKS, "max_lora_rank"
        self.arguments = {
            "model": model, "skip_tokenizer_init": skip_tokenizer_init, "dtype": dtype,
            "revision": revision, "seed": seed, "gpu_memory_utilization": gpu_memory_utilization,
            **kwargs,
        }  # fmt: skip
        config = types.SimpleNamespace(max_model_len=FAULTS.longest)
        self.llm_engine = types.SimpleNamespace(model_config=config)
        self.calls: list[Call] = []
        FAULTS.engines.append(self)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
    ) -> list[RequestOutput]:
        assert use_tqdm is False, "a progress bar shows the number of requests"
        assert isinstance(sampling_params, list)
        assert all(type(s) is SamplingParams for s in sampling_params)
        assert len(sampling_params) == len(prompts)
        assert all(p.keys() == {"prompt_token_ids"} and p["prompt_token_ids"] for p in prompts)
        assert lora_request is None or isinstance(lora_request, LoRARequest)
        if lora_request is not None:
            assert self.arguments["enable_lora"]
            path = Path(lora_request.lora_path)
            assert (path / "adapter_config.json").exists()
            lora_request.weights = load_file(path / "adapter_model.safetensors")
        self.calls.append(Call(prompts, sampling_params, lora_request))
        moved = lora_request is not None and any(w.any() for w in _b(lora_request).values())
        coupled = FAULTS.couples_requests or (FAULTS.couples_with_an_adapter and moved)
        assert all(len(p["prompt_token_ids"]) <= FAULTS.longest for p in prompts)
        return [
            _output(number, p["prompt_token_ids"], s, lora_request is None, len(prompts), coupled)
            for number, (p, s) in enumerate(zip(prompts, sampling_params, strict=True))
        ]


def _b(request: LoRARequest) -> dict[str, Any]:
    return {name: weight for name, weight in request.weights.items() if "lora_B" in name}


def _output(
    number: int, prompt: list[int], settings: SamplingParams, base: bool, others: int, coupled: bool
) -> RequestOutput:
    assert settings.seed is not None
    ends = settings.stop_token_ids or []
    seed = settings.seed + (others if coupled else 0)
    tokens = answer(prompt, seed, base, settings.max_tokens or 16, ends)
    reason = "stop" if tokens[-1] in ends else "length"
    if FAULTS.cuts_short and number == 0:
        tokens, reason = [1], "abort"
    wrong = 1e-5 * others if FAULTS.couples_logprobs else 0.0
    logprobs = [{t: types.SimpleNamespace(logprob=-1.0 - wrong)} for t in tokens]
    made = CompletionOutput(0, "", tokens, None, logprobs, reason)
    return RequestOutput(str(number), None, prompt, None, [made], finished=True)


def answer(prompt: list[int], seed: int, base: bool, length: int, ends: list[int]) -> list[int]:
    """The response of the stand-in to one request."""
    drawn = np.random.default_rng([seed, base, *prompt]).integers(0, 6, length).tolist()
    first = next((place for place, token in enumerate(drawn) if token in ends), length)
    return drawn[: first + 1]


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-in where ``import vllm`` finds it, in batch-invariant mode."""
    vars(FAULTS).update(vars(Faults()))
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": LLM, "SamplingParams": SamplingParams, "__version__": VERSION},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": True},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
    }
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        patch.setitem(sys.modules, name, module)
