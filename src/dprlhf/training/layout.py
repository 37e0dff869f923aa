"""Startup checks on made-up rows: the largest batches fit, and no user changes another's values.

The largest batches must fit into memory, and a row's floating-point values must not depend on the
contents of the other rows of its batch. Otherwise a user could end the run, or change another
user's contribution by rounding. Both depend on the machine, so both are tried on it, at the run's
own shapes:

- **memory**: sampling and the gradient at the longest prompt, and the gradient of a user with all
  the prompts that a user may have;
- **contents**: a made-up row keeps its place, and its values must keep all their bits where the
  other rows are blank, longer, shorter or of other tokens, and where nothing changes at all. Shapes
  and places are public constants (:mod:`dprlhf.rollout`), so a kernel may round by them.

Where a value changes, the run is refused. The adapter has random weights meanwhile, because one
that starts at zero would hide its own rounding. The proof, and what the check cannot see, is in
``docs/proofs/fixed_places.md``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout.decoding import try_last_step
from dprlhf.rollout.made_up import random_adapter
from dprlhf.rollout.sampling import prompts_at_once, static_steps
from dprlhf.training.made_up_rounds import (
    Shapes,
    Values,
    check_gradients,
    contributions,
    distance_by_padding,
    gradients_of,
    logits_of,
    logprobs_of,
)
from dprlhf.training.processes import Processes


def check_layout(policy: CausalLMPolicy, shapes: Shapes, processes: Processes) -> str:
    """Try the run's shapes on this machine, and that no made-up row changes another's values."""
    with random_adapter(policy):
        check_gradients(policy, shapes)
        if policy.one_user_a_pass is not None and processes.main:
            reason = policy.one_user_a_pass
            done = "in passes of its own" if policy.mixes_rows else "differentiated alone"
            print(f"dprlhf: each user is {done}, which is slower: {reason}", file=sys.stderr)
        problem = _problem(policy, shapes)
    if float(processes.sum(torch.tensor([float(problem is not None)], dtype=torch.float64))):
        raise problem or DprlhfError("another process could not keep to the run's shapes")
    sampled = "sampling, log-probabilities, " if shapes.rollout is not None else ""
    count = torch.get_num_threads()
    threads = f"{count} thread" + "s" * (count > 1)
    return (
        "checked at start on this machine (and again at each resume): made-up rows, each at its"
        " place, gave the same bits with blank, longer, shorter and other rows around them, and"
        f" when computed again, in {sampled}gradients, on {policy.device.type} with {threads}, at"
        f" prompts of {shapes.prompt} tokens"
        f"{', each user differentiated alone' * (policy.one_user_a_pass is not None)}."
        " It is a sample of rows, not all that could occur"
    )


def _problem(policy: CausalLMPolicy, shapes: Shapes) -> DprlhfError | None:
    """Return why the run is refused; None where nothing speaks against it."""
    key = _key(policy, shapes)
    if key in _KNOWN:
        return None
    try:
        phase = _first_dependent_phase(policy, shapes)
        _try_largest(policy, shapes)
        _check_padding(policy, shapes)
    except _NotANumberError:
        return DprlhfError(
            "the model computes NaN on made-up tokens, and a row with such a value contributes"
            " nothing: check the model's weights (policy.model_name_or_path), or load it with"
            " another policy.dtype or policy.attn_implementation"
        )
    except DprlhfError as problem:
        return problem
    if phase is not None:
        return DprlhfError(
            f"{phase}, so one user's influence cannot be bounded; try policy.attn_implementation:"
            " eager, policy.dtype: float32, one thread (OMP_NUM_THREADS=1), or another device"
        )
    _KNOWN.add(key)
    return None


class _NotANumberError(Exception):
    """A value is NaN, which is not even equal to itself."""


_KNOWN: set[tuple[str, ...]] = set()
"""What has passed in this process: the same shapes of the same model need no second check."""


def _key(policy: CausalLMPolicy, shapes: Shapes) -> tuple[str, ...]:
    weights = [(n, tuple(p.shape), p.dtype) for n, p in policy.model.named_parameters()]
    config = getattr(policy.model, "config", None)
    trained = sorted(policy.parameters)
    attention = getattr(config, "_attn_implementation", "")
    threads, device = torch.get_num_threads(), str(policy.device)
    drawn = policy.temperature, policy.sampling
    facts = (type(policy), config, attention, weights, trained, drawn, shapes, threads, device)
    return (*map(str, facts), str(policy.one_user_a_pass))


# --- memory --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_memory(what: str, lower: str) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the setting to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        texts = ("out of memory", "not enough memory", "can't allocate memory")
        if not isinstance(error, MemoryError) and not any(t in str(error) for t in texts):
            raise
        raise DprlhfError(
            f"{what} does not fit into memory, and a user could cause it in any round: lower"
            f" {lower}"
        ) from None


def _try_largest(policy: CausalLMPolicy, shapes: Shapes) -> None:
    """Try the last step of sampling, and a user with many prompts."""
    for turn in shapes.turns:
        assert shapes.rollout is not None
        with _in_memory(_sampling(shapes), turn.lower):
            size, together = prompts_at_once(policy, shapes.rollout.batch_size, turn.together)
            sizes = {"width": turn.width, "num_generations": together, "size": size}
            sizes["max_new_tokens"] = shapes.response
            try_last_step(policy, **sizes, static=static_steps(policy, shapes.rollout, **sizes))
    if shapes.rows * shapes.prompts > shapes.update.batch_size:
        with _in_memory(
            f"the gradient of a user with {shapes.prompts} prompts",
            "update.batch_size or data.max_prompts_per_user",
        ):
            for _ in contributions(policy, shapes, [0], prompts=shapes.prompts):
                pass


def _sampling(shapes: Shapes) -> str:
    assert shapes.rollout is not None
    return (
        f"sampling {shapes.rollout.batch_size} responses of {shapes.response} tokens to prompts of"
        f" {shapes.prompt}"
    )


# --- padding -------------------------------------------------------------------------------------


def _check_padding(policy: CausalLMPolicy, shapes: Shapes) -> None:
    """Refuse a model that gives tokens other probabilities behind padding, or by its cache."""
    if policy.model.get_output_embeddings() is None:  # a classifier's texts begin at the left
        return
    exact = all(p.dtype in (torch.float32, torch.float64) for p in policy.network.parameters())
    distance = distance_by_padding(policy, shapes)
    if distance > (0.01 if exact else 0.15):
        raise DprlhfError(
            f"policy.model_name_or_path: {type(policy.network).__name__} gives a token other"
            " probabilities where padding stands before its prompt, or step by step (their total"
            f" variation distance is {distance:.2g}), so it would learn another distribution than"
            " its own; choose another model"
        )


# --- rounding ------------------------------------------------------------------------------------


def _first_dependent_phase(policy: CausalLMPolicy, shapes: Shapes) -> str | None:
    """Return the first phase in which a row changes with what the others contain, in words."""
    for turn in shapes.turns:
        assert shapes.rollout is not None
        with _in_memory(_sampling(shapes), turn.lower):
            size, _ = prompts_at_once(policy, shapes.rollout.batch_size, turn.together)
            if how := _dependence(size, partial(logits_of, policy, shapes, turn)):
                return f"{turn.name}: {how}"
    size = max(1, shapes.update.batch_size // shapes.rows)
    if policy.one_user_a_pass is not None:
        size = min(size, 2)  # they share no pass, and a user's whole gradient is large
    tokens = f"{shapes.update.batch_size} rows of {shapes.prompt + shapes.response} tokens"
    with _in_memory(f"the gradient of {tokens}", "update.batch_size or data.max_prompt_tokens"):
        if how := _dependence(size, lambda some: gradients_of(policy, shapes, some)):
            return f"gradients: {how}"
        if shapes.rollout is None and shapes.rows == 1:
            return None  # a supervised loss whose weights need no log-probabilities
        if how := _dependence(size, lambda some: logprobs_of(policy, shapes, some)):
            return f"log-probabilities: {how}"
    return None


def _dependence(size: int, values: Callable[[Sequence[int | None]], Values]) -> str:
    """Return in words how values of made-up users depend on the others; empty where they do not."""
    everyone = list(range(size))
    full = values(everyone)
    # Half of the users beside blank rows, the other half beside those of other users.
    blank = [n if n % 2 == 0 else None for n in everyone]
    other = [n if n % 2 else size + 1 + n for n in everyone]
    if _differ(full, values(everyone), everyone):
        return "the same rows give other bits each time"
    if _differ(full, values(blank), everyone[::2]) or _differ(full, values(other), everyone[1::2]):
        return "on this machine a row's bits depend on what the other rows contain"
    return ""


def _differ(one: Values, other: Values, places: Sequence[int]) -> bool:
    pairs = [
        (a, b)
        for place in places
        for a, b in zip(one[place], other[place], strict=False)  # one batch may end earlier
    ]
    different = [pair for pair in pairs if not torch.equal(*pair)]
    if any(value.isnan().any() for pair in different for value in pair):
        raise _NotANumberError
    return bool(different)
