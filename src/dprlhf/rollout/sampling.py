"""Sampling: y ~ μ and y′ ~ π_t, several responses for each prompt (He & Zhou, Algorithm 1)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.boundary import Private
from dprlhf.data.users import Prompts
from dprlhf.errors import EXITS
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.kept import Keep, Kept, Layout, room_for
from dprlhf.policies.kept import keep as keep_outputs
from dprlhf.privacy.randomness import uniforms
from dprlhf.rollout.batch import Responses, Tick, in_batches, prompt_width, responses_of
from dprlhf.rollout.decoding import batch_size, decode

if TYPE_CHECKING:
    from dprlhf.rollout.static_steps import StaticSteps


def resolve_batch_size(
    spec: recipe.Rollout, policy: CausalLMPolicy, *, rows: float, max_prompt_tokens: int
) -> recipe.Rollout:
    """Choose the batch size of a run for this machine, and start vLLM if the recipe asks for it."""
    if spec.backend == "vllm":
        from dprlhf.rollout import vllm

        vllm.check_rows(policy, rows=rows, prompt=max_prompt_tokens, response=spec.max_new_tokens)
    if spec.batch_size != "auto":
        return spec
    size = batch_size(policy, prompt=max_prompt_tokens, response=spec.max_new_tokens, rows=rows)
    return spec.model_copy(update={"batch_size": size})


def replays_graphs(policy: CausalLMPolicy, spec: recipe.Rollout) -> bool:
    """Return whether decoding replays CUDA graphs: on a GPU wherever possible."""
    if policy.device.type != "cuda" or spec.backend == "vllm" or spec.agent is not None:
        return False  # vLLM captures its own, and the turns of an agent have too many shapes
    from dprlhf.rollout.static_steps import steps_are_alike

    return steps_are_alike(policy)


def static_steps(policy: CausalLMPolicy, spec: recipe.Rollout, **sizes: int) -> StaticSteps | None:
    """Return decoding steps over fixed tensors, for CUDA graphs; None where steps grow."""
    if not replays_graphs(policy, spec):
        return None
    from dprlhf.rollout.static_steps import StaticSteps

    return StaticSteps(policy, **sizes)


def public_sampling_settings(spec: recipe.Rollout, prompts: int, responses: int) -> recipe.Rollout:
    """Return settings to sample PUBLIC prompts, by their number, in the fewest micro-batches."""
    assert spec.batch_size != "auto"
    batches = max(1, -(-prompts * responses // spec.batch_size))
    size = min(spec.batch_size, max(1, -(-prompts // batches)) * responses)
    chosen = {"responses": responses, "batch_size": size, "base_policy": "on-policy"}
    return spec.model_copy(update=chosen)


def most_kept(
    policy: CausalLMPolicy,
    spec: recipe.Rollout,
    *,
    rows: float,
    max_prompt_tokens: int,
    most: Keep = "outputs",
) -> Keep | None:
    """Return the most that sampling can keep of what it computes, and has the memory for."""
    if policy.sampler is not None or spec.backend == "vllm" or spec.base_policy != "on-policy":
        return None
    if replays_graphs(policy, spec):  # a graph calls no hook
        return None
    return room_for(
        policy,
        rows=rows,
        prompt=max_prompt_tokens,
        response=spec.max_new_tokens,
        together=spec.responses,
        most=most,
    )


def sample_responses(
    policy: CausalLMPolicy,
    prompts: Private[Prompts],
    spec: recipe.Rollout,
    *,
    round_: int,
    **settings: Any,  # further ones of :func:`sample`
) -> Private[Responses]:
    """Sample this round's responses to the private users' prompts, as :func:`sample` does."""
    use = ("rollout", round_)
    return prompts.map(
        lambda some: sample(policy, some, spec, context=use, private=True, **settings)
    )


def sample(
    policy: CausalLMPolicy,
    prompts: Prompts,
    spec: recipe.Rollout,
    *,
    key: bytes,
    context: tuple[str | int, ...],
    max_prompt_tokens: int,
    tick: Tick | None = None,
    private: bool = False,
    keep: Keep | None = None,
) -> Responses:
    """Sample ``spec.responses`` responses for each prompt.

    A row's draws depend on the key, ``context`` (the name of the use), the row's user and prompt,
    and the response's number, on nothing else.

    A policy with a ``sampler`` of its own, such as an agent, acts in several turns, and the sampler
    makes the same promise. With ``private`` prompts an error costs its user's responses and not the
    run, and quotes nothing.

    With ``base_policy: reference`` the first half of a prompt's rows come from μ (the adapter
    off) and the rest from π_t; with ``on-policy`` all come from π_t.
    """
    if policy.sampler is not None:
        responses: Responses = policy.sampler(
            policy,
            prompts,
            spec,
            key=key,
            context=context,
            max_prompt_tokens=max_prompt_tokens,
            tick=tick,
            private=private,
        )
    else:
        draws = draws_of(prompts, key, context, spec.responses, spec.max_new_tokens)
        kept = None if keep is None else keep_outputs(policy, keep)
        responses = _one_turn(policy, prompts, spec, draws, max_prompt_tokens, tick, kept)
    if spec.mask_truncated:
        return Responses(**{**vars(responses), "left_out": ~ended(policy, responses)})
    return responses


def sample_public(
    policy: CausalLMPolicy,
    prompts: Prompts,
    settings: recipe.Recipe | recipe.FeedbackRecipe,
    rollout: recipe.Rollout,
    *use: str | int,  # the name of the use, and what tells draws of one use apart
    keep: Keep | None = None,
) -> Responses:
    """Sample responses to PUBLIC prompts; the draws need no secrecy, and follow from the seed."""
    name, *of_use = use
    return sample(
        policy,
        prompts,
        rollout,
        key=bytes(32),
        context=(name, settings.seed, *of_use),
        max_prompt_tokens=settings.data.max_prompt_tokens,
        keep=keep,
    )


def ended(policy: CausalLMPolicy, responses: Responses) -> NDArray[np.bool_]:
    """Return which responses end by an end token or a stop string of their own, ``[rows]``."""
    tokens = responses.tokens[:, -responses.max_new_tokens :]
    lengths = responses.response_mask.sum(1)
    last = (lengths[:, None] - 1).clamp(min=0)
    done = torch.isin(tokens.gather(1, last), torch.tensor(policy.end_tokens))[:, 0]
    if policy.stop is not None:
        within = lengths.clamp(max=policy.stop.reach)
        for width in np.unique(within.numpy()).tolist():
            rows = (within == width).nonzero()[:, 0]
            columns = lengths[rows, None] - width + torch.arange(width)
            if width:
                done[rows] |= policy.stop.completed(tokens[rows].gather(1, columns))
    flags: NDArray[np.bool_] = (done & responses.policy_mask.gather(1, last)[:, 0].bool()).numpy()
    return flags


def _as_seen(
    policy: CausalLMPolicy, prompts: Prompts, most: int
) -> tuple[list[list[int]], Prompts]:
    """Return the prompts' tokens, and the prompts with what is left of those that are too long."""
    whole = policy.encode(prompts.prompts, most + 1, prompts.for_template)
    encoded = [tokens[-most:] for tokens in whole]
    given = list(prompts.prompts)
    for n in (n for n, tokens in enumerate(whole) if len(tokens) > most):
        given[n] = left_of(policy, given[n], encoded[n])
    return encoded, prompts.changed(prompts=given)


def left_of(policy: CausalLMPolicy, prompt: Any, tokens: Sequence[int]) -> Any:
    """Return what is left of a prompt whose last tokens these are, for rewards to see it so."""
    # A conversation that was cut is one message with the role of its last one.
    text = text_of_tokens(policy, tokens)
    return text if isinstance(prompt, str) else [{**prompt[-1], "content": text}]


def _one_turn(
    policy: CausalLMPolicy,
    prompts: Prompts,
    spec: recipe.Rollout,
    draws: torch.Tensor,
    max_prompt_tokens: int,
    tick: Tick | None,
    kept: Kept | None,
) -> Responses:
    """Sample responses of one turn with these draws, ``[prompts, k, max_new_tokens]``."""
    k, max_new_tokens = spec.responses, spec.max_new_tokens
    encoded, prompts = _as_seen(policy, prompts, max_prompt_tokens)
    width = prompt_width(prompts, encoded, max_prompt_tokens)
    rows = len(prompts) * k
    written: list[list[int]] = [[]] * rows
    failed = np.zeros(rows, dtype=bool)
    from_base = np.arange(k) < (k // 2 if spec.base_policy == "reference" else 0)
    sampled = None
    generate: Callable[..., Iterator[tuple[Any, ...]]]
    if spec.backend == "vllm":
        from dprlhf.rollout import vllm

        generate, sampled = vllm.generate, np.zeros((rows, max_new_tokens))
    else:
        generate = partial(generate_rows, places=prompts.places, width=width, kept=kept)
    # Two passes, not one with PEFT's adapter_names: that costs hooks on every layer at every step,
    # and saves filler rows only.
    for base in np.unique(from_base):
        numbers = np.flatnonzero(from_base == base)
        row_of = np.append((k * np.arange(len(prompts))[:, None] + numbers).ravel(), -1)
        with policy.base() if base else contextlib.nullcontext():
            for positions, responses, *logprobs in generate(
                policy, encoded, draws[:, numbers], spec
            ):
                for row, response in zip(row_of[positions], responses, strict=True):
                    if row >= 0:
                        failed[row] = response is None
                        written[row] = response or policy.end_tokens[:1] or [0]
                if sampled is not None:
                    sampled[row_of[positions]] = logprobs[0]
                if kept is not None:
                    kept.assign_rows(row_of[positions], rows)
                if tick is not None:
                    tick(int((positions >= 0).sum()))
    return responses_of(
        prompts,
        k,
        [prompt for prompt in encoded for _ in range(k)],
        written,
        width=width,
        length=max_new_tokens,
        padding=policy.tokenizer.pad_token_id,
        from_base=np.tile(from_base, len(prompts)),
        texts=[text_of_tokens(policy, tokens) for tokens in written],
        num_generations=k,
        failed=failed if spec.backend == "vllm" else None,
        sampled=sampled,
        kept=kept if kept is not None and kept.batches else None,
    )


def text_of_tokens(policy: CausalLMPolicy, tokens: Sequence[int]) -> str:
    """Return the text of some tokens without special ones, or "" where they have none."""
    try:
        return str(policy.tokenizer.decode(tokens, skip_special_tokens=True))
    except EXITS:
        raise
    except BaseException:  # tokens that have no text must not end the run of everybody
        return ""


def draws_of(
    prompts: Prompts, key: bytes, context: tuple[str | int, ...], k: int, max_new_tokens: int
) -> torch.Tensor:
    """Return one uniform draw in (0, 1) per token, ``[prompts, k, max_new_tokens]``."""
    draws = [
        uniforms(key, *context, int(user), int(slot), count=k * max_new_tokens)
        for user, slot in zip(prompts.users, prompts.slots, strict=True)
    ]
    return torch.from_numpy(np.array(draws).reshape(-1, k, max_new_tokens))


def prompts_at_once(
    policy: CausalLMPolicy, batch_size: int | Literal["auto"], num_generations: int
) -> tuple[int, int]:
    """Return how many prompts a micro-batch of sampling has, and how many responses to each."""
    assert batch_size != "auto", "resolve_batch_size() turns auto into a number, once for a run"
    limit = min(num_generations, batch_size)
    together = max(c for c in range(1, limit + 1) if num_generations % c == 0)
    return (1 if policy.mixes_rows else batch_size // together), together


def generate_rows(
    policy: CausalLMPolicy,
    prompts: Sequence[list[int]],
    draws: torch.Tensor,  # Uniform draws, [prompts, num_generations, max_new_tokens]
    spec: recipe.Rollout,
    *,
    places: NDArray[np.int64],  # [places]
    width: int,
    room: Sequence[int] | None = None,
    kept: Kept | None = None,
) -> Iterator[tuple[NDArray[np.int64], list[list[int]]]]:
    """Yield row numbers, flat ``[prompts · num_generations]``, −1 a filler, and responses."""
    # A micro-batch has places that follow one another, of one width. All responses to a prompt
    # share its prefill, or the largest divisor of their number that fits.
    _, num_generations, max_new_tokens = draws.shape
    size, together = prompts_at_once(policy, spec.batch_size, num_generations)
    parts = num_generations // together
    of_parts = np.arange(parts) + parts * places[:, None]
    groups = F.pad(draws.reshape(-1, together, max_new_tokens), (0, 0, 0, 0, 0, 1), value=0.5)
    sizes = {"num_generations": together, "max_new_tokens": max_new_tokens}
    static = static_steps(policy, spec, size=size, width=width, **sizes)
    assert static is None or kept is None, "a graph calls no hook"
    layout = Layout(size, 1 + width, together, max_new_tokens)
    for group in in_batches(np.where(places[:, None] < 0, -1, of_parts).ravel(), size):
        asked = [None if g < 0 else int(g) // parts for g in group]
        with contextlib.nullcontext() if kept is None else kept.recording(layout):
            responses = decode(
                policy,
                [None if p is None else prompts[p] for p in asked],
                groups[group],
                width=width,
                room=None if room is None else [0 if p is None else room[p] for p in asked],
                static=static,
            )
        rows = group[:, None] * together + np.arange(together)
        yield np.where(group[:, None] < 0, -1, rows).ravel(), responses
