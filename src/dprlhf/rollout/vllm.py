"""Sampling by vLLM, for long responses on a GPU; the adapter is sent as a LoRA request.

It has not been run on a GPU: the tests use vLLM's CPU engine, which has no batch-invariant mode and
is refused outside of them.

vLLM batches the requests that are present, so its shapes depend on the users of the round. Only its
batch-invariant mode makes a row's tokens independent of the others. Without it one user could
change what others contribute, and the sensitivity would be wrong. So the mode is required, with
Triton's attention and synchronous scheduling: FlashAttention 3, the default on some GPUs, breaks
the mode where prefill and decoding share a batch (vLLM's issues 47069 and 51902). Before the first
round made-up tokens must get the same responses and log-probabilities, to the bit, alone and among
others, at the run's own lengths and with an adapter away from zero. That is a check and no proof:
vLLM calls the mode beta, and tests it on a list of models.

Differences from :mod:`dprlhf.rollout.decoding`:

- The distribution is the same, the draws are not: vLLM has a generator for each request, seeded
  here with the row's own first uniform number.
- top_k, top_p and min_p are vLLM's own. They mean the same; a token that rounding
  alone lets vLLM keep counts as kept (:mod:`dprlhf.policies.warpers`).
- vLLM has its own kernels and rounds the adapter to bfloat16, while the update's log-probabilities
  are those of transformers. So vLLM's own come with the responses, and each response counts with
  the truncated ratio of the two (:func:`dprlhf.updates.pg.sampler_ratio`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.errors import DprlhfError, one_line
from dprlhf.policies.causal_lm import CausalLMPolicy, random_adapter

_INSTALL = "pip install -e '.[vllm]' in the clone"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM accepts for max_lora_rank
# Below the first vLLM raises the temperature to it, or decodes greedily; it refuses any above the
# second.
_COOLEST, _HOTTEST = 0.01, 2.0
_adapter_ids = itertools.count(1)
_MOST_TRIED = 256  # rows of the check before the first round


def generate(
    policy: CausalLMPolicy,
    prompts: Sequence[list[int]],
    draws: torch.Tensor,
    spec: recipe.Rollout,
) -> Iterator[tuple[NDArray[np.int64], list[list[int] | None], NDArray[np.float64]]]:
    """Yield once: all row numbers, flat ``[prompts · num_generations]``, responses, their log π."""
    count, num_generations, max_new_tokens = draws.shape
    if count:
        seeds = (draws[..., 0].flatten() * 2.0**53).long().tolist()
        rows = [prompt for prompt in prompts for _ in range(num_generations)]
        lengths = [max_new_tokens] * len(rows)
        outputs = _sample(engine(policy), policy, rows, seeds, lengths)
        responses = [_whole(policy, output, max_new_tokens) for output in outputs]
        logprobs = np.zeros((len(rows), max_new_tokens))
        for row, (response, output) in enumerate(zip(responses, outputs, strict=True)):
            if response is not None:
                logprobs[row, : len(response)] = _logprobs(output)
        yield np.arange(len(rows)), responses, logprobs


def _logprobs(output: Any) -> list[float]:
    return [at[t].logprob for at, t in zip(output.logprobs, output.token_ids, strict=True)]


def _whole(policy: CausalLMPolicy, output: Any, max_new_tokens: int) -> list[int] | None:
    """Return a response's tokens; None where the engine broke it off: its user is left out."""
    tokens = list(output.token_ids)
    ended = len(tokens) == max_new_tokens or (tokens and tokens[-1] in policy.end_tokens)
    return tokens if ended else None


def check_rows(policy: CausalLMPolicy, *, rows: float, prompt: int, response: int) -> None:
    """Start vLLM, and refuse it where rows of these lengths do not fit or move one another."""
    llm = engine(policy)
    fits = llm.llm_engine.model_config.max_model_len
    if prompt + response > fits:  # a longer row would raise for all of a round's users
        raise DprlhfError(
            f"rollout.backend vllm: prompts of {prompt} and responses of {response} tokens do not"
            f" fit into the {fits} that the model or the GPU's memory allow: choose smaller"
            " data.max_prompt_tokens or rollout.max_new_tokens"
        )
    with random_adapter(policy, 0.05):
        _check_invariance(llm, policy, min(max(int(rows), 16), _MOST_TRIED), prompt, response)


@functools.lru_cache(maxsize=1)
def engine(policy: CausalLMPolicy) -> Any:
    """Start vLLM, once per policy."""
    _refuse(policy)
    share = _share_of_gpu(policy)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        made = _module("vllm").LLM(
            model=policy.network.name_or_path,
            # The commit that transformers loaded: the gradients are those of its weights.
            revision=getattr(policy.network.config, "_commit_hash", None),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=-1,  # the model's own, or what fits
            attention_backend="TRITON_ATTN",  # keeps the mode where FlashAttention 3 does not
            async_scheduling=False,
            gpu_memory_utilization=share,
            enable_lora=True,
            max_loras=1,
            max_lora_rank=_largest_rank(policy),
            enable_prefix_caching=False,  # a shared prefix would couple users
            generation_config="vllm",  # ignore the checkpoint's penalties
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            disable_log_stats=True,
            seed=0,
        )
    except Exception as error:
        raise DprlhfError(f"rollout.backend vllm: {one_line(error)}") from None
    return made


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DprlhfError(f"rollout.backend vllm: {error}; install it with {_INSTALL}") from None


def _share_of_gpu(policy: CausalLMPolicy) -> float:
    """Return half of the free share of the GPU; refuse where rows could move one another."""
    if policy.device.type != "cuda" or torch.distributed.is_initialized():
        raise DprlhfError(
            "rollout.backend vllm needs one process with a GPU; otherwise take"
            " rollout.backend: transformers"
        )
    # In a process of its own: the mode replaces matrix products by kernels without a backward pass.
    if os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        raise DprlhfError(
            "rollout.backend vllm: set VLLM_BATCH_INVARIANT=1 before the start; without it one"
            " user's prompt can change the tokens of others, which no noise covers"
        )
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "1":
        raise DprlhfError(
            "rollout.backend vllm: unset VLLM_ENABLE_V1_MULTIPROCESSING; the engine must run in a"
            " process of its own, apart from the gradients"
        )
    vllm, envs, platforms = map(_module, ("vllm", "vllm.envs", "vllm.platforms"))
    if not getattr(envs, "VLLM_BATCH_INVARIANT", False) or not platforms.current_platform.is_cuda():
        raise DprlhfError(
            f"rollout.backend vllm: version {vllm.__version__} has no batch-invariant mode; put the"
            f" one for CUDA in its place with {_INSTALL}"
        )
    torch.cuda.empty_cache()  # what torch holds without need, another process cannot have
    free, total = torch.cuda.mem_get_info(policy.device)
    return free / total / 2


def _refuse(policy: CausalLMPolicy) -> None:
    """Refuse policies that vLLM cannot sample, before it is loaded."""
    config = getattr(policy.model, "peft_config", {}).get("default")
    trained = all(".lora_A." in n or ".lora_B." in n for n in policy.parameters)
    if config is None or config.peft_type != "LORA" or not trained:
        raise DprlhfError(
            "rollout.backend vllm loads LoRA adapters only (policy.adapter.type lora or"
            " ffa-lora); for others take rollout.backend: transformers"
        )
    if policy.mixes_rows:
        raise DprlhfError(
            f"rollout.backend vllm: {policy.mixes_rows}, and vllm samples many users in a pass;"
            " take rollout.backend: transformers"
        )
    if policy.model.get_input_embeddings().weight.dtype != torch.bfloat16:
        raise DprlhfError("rollout.backend vllm needs policy.dtype: bfloat16, its adapters' type")
    if not _COOLEST <= policy.temperature <= _HOTTEST:
        raise DprlhfError(
            f"rollout.temperature {policy.temperature}: vllm samples exactly from {_COOLEST} to"
            f" {_HOTTEST}"
        )
    if policy.stop is not None:
        raise DprlhfError(
            "rollout.stop: vllm gets tokens here and makes no text of them; take"
            " rollout.backend: transformers"
        )
    if policy.sampling.min_p > 0 and policy.sampling.top_p < 1:
        raise DprlhfError(
            "rollout.min_p: vllm applies it before top_p and transformers after it, which keeps"
            " other tokens: leave one of them out"
        )


def _largest_rank(policy: CausalLMPolicy) -> int:
    rank = policy.model.peft_config["default"].r
    for largest in _RANKS:
        if rank <= largest:
            return largest
    raise DprlhfError(f"policy.adapter.rank {rank}: vllm takes at most {_RANKS[-1]}")


def _sample(
    llm: Any,
    policy: CausalLMPolicy,
    prompts: list[list[int]],
    seeds: list[int],
    lengths: list[int],
) -> list[Any]:
    """Return vLLM's output for each prompt; each call sends the adapter under a new LoRA id."""
    vllm = _module("vllm")
    settings = [
        vllm.SamplingParams(
            temperature=policy.temperature,
            top_p=policy.sampling.top_p,
            top_k=policy.sampling.top_k,
            min_p=policy.sampling.min_p,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=seed,
            max_tokens=length,
            ignore_eos=True,  # else vLLM adds end tokens of the checkpoint to ours
            stop_token_ids=policy.end_tokens,
            logprobs=0,  # the sampled token's alone
            detokenize=False,
        )
        for seed, length in zip(seeds, lengths, strict=True)
    ]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        adapter = None
        if not policy.is_base:
            policy.save(Path(folder))
            number = next(_adapter_ids)  # vLLM caches adapters by id
            request = _module("vllm.lora.request").LoRARequest
            adapter = request(f"round-{number}", number, folder)
        try:  # A progress bar would reveal the number of requests.
            outputs = llm.generate(requests, settings, lora_request=adapter, use_tqdm=False)
        except Exception as error:  # its message may quote a prompt
            raise DprlhfError(f"rollout.backend vllm stopped: {type(error).__name__}") from None
    return [output.outputs[0] for output in outputs]


def _check_invariance(
    llm: Any, policy: CausalLMPolicy, rows: int, prompt: int, response: int
) -> None:
    """Refuse an engine that answers made-up rows otherwise alone, among few and among many."""
    # Rows of many lengths end at different steps: prefill of some meets the decoding of others.
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    prompts = [
        [(31 * i + 7 * j) % vocabulary for j in range(1 + (i * 89) % prompt)] for i in range(rows)
    ]
    lengths = [1 + (i * 53) % response for i in range(rows)]

    def answers(chosen: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        of_chosen = [prompts[i] for i in chosen], list(chosen), [lengths[i] for i in chosen]
        outputs = _sample(llm, policy, *of_chosen)
        return [(list(o.token_ids), _logprobs(o)) for o in outputs]

    among_all = answers(range(rows))
    some = list(range(0, rows, 3))[::-1]
    alone = range(0, rows, -(-rows // 8))
    if answers(some) != [among_all[i] for i in some] or any(
        answers([i])[0] != among_all[i] for i in alone
    ):
        raise DprlhfError(
            "rollout.backend vllm: a prompt gets other tokens or log-probabilities alone than"
            " beside others, in spite of VLLM_BATCH_INVARIANT=1; for this model take"
            " rollout.backend: transformers"
        )
