"""Startup checks on made-up rows: the largest batches fit, and no row changes another's values.

The largest batches must fit into memory, and a row's floating-point values must not depend on the
other rows of its batch. Otherwise a user could end the run, or change another user's contribution
by rounding. Both depend on the machine, so both are tried on it, at the run's own shapes:

- **memory**: sampling and the gradient at the longest prompt, and the gradient of a user with all
  the prompts that a user may have;
- **rounding**: the values of a row must be the same, bit for bit, at another place of a micro-batch
  and with other rows and fillers around it. On two threads, PyTorch's fused attention on a CPU is
  known to break this in float32.

Where rows do move each other, the model's attention becomes plain matrix products (``eager``);
where that is not enough, a micro-batch holds the responses to one prompt of one user. Where even
then the same rows give other bits, the run is refused. The adapter has random weights meanwhile,
because one that starts at zero would hide its own rounding.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.rollout.batch import padded_width
from dprlhf.rollout.decoding import try_last_step
from dprlhf.rollout.sampling import prompts_at_once
from dprlhf.training.made_up_rounds import (
    Shapes,
    check_gradients,
    contributions,
    distance_by_padding,
    gradients_of,
    logits_of,
    logprobs_of,
    sampled_rows,
    static_steps,
)
from dprlhf.training.processes import Processes


def settle_layout(
    policy: CausalLMPolicy, shapes: Shapes, processes: Processes
) -> tuple[Shapes, str]:
    """Choose a layout in which no row moves another on this machine, and try its largest shapes.

    Args:
        policy: The policy, on its device. Its attention may change, and whether its users are
            differentiated one at a time; its parameters do not.
        shapes: The shapes of the run.
        processes: This process among those of the launch, which all use one layout.

    Returns:
        The shapes to use, and a sentence for the privacy card.

    Raises:
        DprlhfError: A shape does not fit into memory, or no layout keeps rows apart.
    """
    with _random_adapter(policy):
        check_gradients(policy, shapes)
    if policy.one_user_a_pass is not None and processes.main:
        print(
            f"dprlhf: each user is differentiated alone, which is slower: {policy.one_user_a_pass}",
            file=sys.stderr,
        )
    for name, change in _LAYOUTS.items():
        tried = change(policy, shapes)
        if tried is None:
            continue
        with _random_adapter(policy):
            moved, problem = _outcome(policy, tried)
        counts = torch.tensor([moved is not None, problem is not None], dtype=torch.float64)
        of_all = processes.sum(counts)
        if of_all[1] > 0:
            raise problem or DprlhfError("another process ran out of memory as it tried its shapes")
        if of_all[0] == 0:
            if name != "batches" and processes.main:
                hint = _HALF if name == "alone" and _is_half(policy) else ""
                print(f"dprlhf: {_CHOSEN[name]}{hint}", file=sys.stderr)
            return tried, _sentence(policy, tried, name)
    if moved == _NOT_A_NUMBER:
        raise DprlhfError(
            f"{moved} on made-up tokens, and a row with such a value contributes nothing:"
            " check the model's weights (policy.model_name_or_path), or load it with another"
            " policy.dtype or policy.attn_implementation"
        )
    raise DprlhfError(
        f"{moved or 'rows'}: on this machine the same rows give other bits each time, so one user's"
        " influence cannot be bounded; use one thread (OMP_NUM_THREADS=1), another"
        " policy.attn_implementation or another device"
    )


def _eager(policy: CausalLMPolicy, shapes: Shapes) -> Shapes | None:
    model = policy.network
    if getattr(model.config, "_attn_implementation", "eager") == "eager":
        return None
    try:
        model.set_attn_implementation("eager")
    except ValueError:  # the model has no such attention
        return None
    return shapes


_LAYOUTS: dict[str, Callable[[CausalLMPolicy, Shapes], Shapes | None]] = {
    "batches": lambda policy, shapes: shapes,
    "eager": _eager,
    "alone": lambda policy, shapes: shapes.alone(),
}

_CHOSEN = {
    "eager": "on this machine a row's rounding depends on its place in fused attention, so it is"
    " computed by plain matrix products (policy.attn_implementation: eager)",
    "alone": "on this machine a row's rounding depends on the other rows of its batch: each batch"
    " has one prompt of one user, which is slower",
}
_HALF = "; policy.dtype: float32, whose products a GPU computes otherwise, may not need it"


def _is_half(policy: CausalLMPolicy) -> bool:
    return any(p.is_floating_point() and p.itemsize == 2 for p in policy.network.parameters())


_NOT_A_NUMBER = "the model computes NaN"
"""What moved, where it is the values that are wrong."""


class _NotANumberError(Exception):
    """A value is NaN, which is not even equal to itself."""


def _sentence(policy: CausalLMPolicy, shapes: Shapes, layout: str) -> str:
    done = ["gradients"]
    if shapes.rollout is not None:
        done = ["sampling", "log-probabilities", *done]
    count = torch.get_num_threads()
    threads = f"{count} thread" + "s" * (count > 1)
    how = {"batches": "as configured", "eager": "with eager attention", "alone": "one user each"}
    return (
        "checked at start on this machine (and again at each resume): made-up rows at other places"
        f" of their micro-batch and with other rows around them gave the same bits in"
        f" {', '.join(done)}, on {policy.device.type} with {threads}, at"
        f" prompts of {' and '.join(map(str, shapes.widths))} tokens; micro-batches {how[layout]}"
        f"{', each user differentiated alone' * (policy.one_user_a_pass is not None)}."
        " It is a sample of rows, not all that could occur"
    )


def _outcome(policy: CausalLMPolicy, shapes: Shapes) -> tuple[str | None, DprlhfError | None]:
    """Return the phase whose values change with the batch, and the error of a shape too large."""
    key = _key(policy, shapes)
    if key in _KNOWN:
        return _KNOWN[key], None
    try:
        moved = _moved(policy, shapes)
        if moved is None:
            _try_largest(policy, shapes)
            _check_padding(policy, shapes)
    except _NotANumberError:  # of this layout: another may compute a number
        moved = _NOT_A_NUMBER
    except DprlhfError as problem:
        return None, problem
    _KNOWN[key] = moved
    return moved, None


_KNOWN: dict[tuple[str, ...], str | None] = {}
"""The outcomes of this process: the same shapes of the same model need no second check."""


def _key(policy: CausalLMPolicy, shapes: Shapes) -> tuple[str, ...]:
    weights = [(n, tuple(p.shape), p.dtype) for n, p in policy.model.named_parameters()]
    config = getattr(policy.model, "config", None)
    trained = sorted(policy.parameters)
    attention = getattr(config, "_attn_implementation", "")
    threads, device = torch.get_num_threads(), str(policy.device)
    drawn = policy.temperature, policy.sampling
    facts = (type(policy), config, attention, weights, trained, drawn, shapes, threads, device)
    return (*map(str, facts), str(policy.one_user_a_pass))


@contextlib.contextmanager
def _random_adapter(policy: CausalLMPolicy) -> Iterator[None]:
    """Give the trained parameters other values inside the context, and back their own after it."""
    before = {name: p.detach().clone() for name, p in policy.parameters.items()}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in policy.parameters.values():
                p.add_(0.02 * torch.randn(p.shape, generator=generator).to(p))
        yield
    finally:
        with torch.no_grad():
            for name, p in policy.parameters.items():
                p.copy_(before[name])


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
    """Try what :func:`_moved` did not: the last step of sampling, and a user with many prompts."""
    if shapes.rollout is not None:
        with _in_memory(_sampling(shapes), "rollout.batch_size or data.max_prompt_tokens"):
            size, together = prompts_at_once(sampled_rows(shapes.rollout), shapes.sampled_together)
            sizes = {"size": size, "width": shapes.prompt, "num_generations": together}
            try_last_step(
                policy,
                **sizes,
                max_new_tokens=shapes.response,
                static=static_steps(policy, shapes, **sizes, max_new_tokens=shapes.response),
            )
        if shapes.rollout.agent is not None:
            from dprlhf.agents import steps_of

            with _in_memory(_sampling(shapes), "rollout.batch_size or rollout.max_new_tokens"):
                width = shapes.prompt + shapes.response
                try_last_step(
                    policy,
                    size=sampled_rows(shapes.rollout),
                    width=width,
                    num_generations=1,
                    max_new_tokens=steps_of(width, shapes.prompt, shapes.response),
                )
    if shapes.rows * shapes.prompts > shapes.update.batch_size:
        with _in_memory(
            f"the gradient of a user with {shapes.prompts} prompts",
            "update.batch_size or data.max_prompts_per_user",
        ):
            for _ in contributions(policy, shapes, [0], shapes.prompt, prompts=shapes.prompts):
                pass


def _sampling(shapes: Shapes) -> str:
    assert shapes.rollout is not None
    return (
        f"sampling {shapes.rollout.batch_size} responses of {shapes.response} tokens to prompts of"
        f" {shapes.prompt}"
    )


# --- padding -------------------------------------------------------------------------------------


def _check_padding(policy: CausalLMPolicy, shapes: Shapes) -> None:
    """Refuse a model that gives tokens other probabilities behind padding, or by its cache.

    Raises:
        DprlhfError: It does, by more than rounding.
    """
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


def _moved(policy: CausalLMPolicy, shapes: Shapes) -> str | None:
    """Return the first phase in which a row's values change with the other rows of its batch.

    The phase is ``sampling``, ``gradients`` or ``log-probabilities``; None if there is none.
    """
    for width in shapes.widths[::-1]:  # the widest first: it needs most memory
        if shapes.rollout is not None:
            with _in_memory(_sampling(shapes), "rollout.batch_size or data.max_prompt_tokens"):
                size, _ = prompts_at_once(sampled_rows(shapes.rollout), shapes.sampled_together)
                if _differ(size, lambda some: logits_of(policy, shapes, some, width)):  # noqa: B023
                    return "sampling"
        size = max(1, shapes.update.batch_size // shapes.rows)
        if policy.one_user_a_pass is not None:
            size = min(size, 2)  # they share no pass, and a user's whole gradient is large
        tokens = f"{shapes.update.batch_size} rows of {shapes.prompt + shapes.response} tokens"
        with _in_memory(f"the gradient of {tokens}", "update.batch_size or data.max_prompt_tokens"):
            if _differ(size, lambda some: gradients_of(policy, shapes, some, width)):  # noqa: B023
                return "gradients"
            if shapes.rollout is None and shapes.rows == 1:
                continue  # a supervised loss whose weights need no log-probabilities
            if _differ(size, lambda some: logprobs_of(policy, shapes, some, width)):  # noqa: B023
                return "log-probabilities"
    return _moved_in_later_turns(policy, shapes)


def _moved_in_later_turns(policy: CausalLMPolicy, shapes: Shapes) -> str | None:
    """Return "sampling" if a context of an agent's later turn depends on its batch."""
    if shapes.rollout is None or shapes.rollout.agent is None:
        return None
    longest, size = shapes.prompt + shapes.response, sampled_rows(shapes.rollout)
    for width in sorted({int(padded_width(2, longest)), longest}):
        with _in_memory(_sampling(shapes), "rollout.batch_size or rollout.max_new_tokens"):
            if _differ(size, lambda some: logits_of(policy, shapes, some, width, longest)):  # noqa: B023
                return "sampling"
    return None


def _differ(size: int, values: Callable[[Sequence[int]], list[list[torch.Tensor]]]) -> bool:
    """Compare the values of made-up users in a full batch with those at other places of a thin one.

    Args:
        size: Number of users in a batch.
        values: Returns the values of each user, given their numbers in the order of their places.

    Raises:
        _NotANumberError: Values differ, and some are NaN.
    """
    full = values(range(size))
    # Every second one, in reverse: other places, other neighbours, and fillers in the other half.
    chosen = list(range(1, size, 2))[::-1] or [0]
    pairs = [
        (a, b)
        for number, thin in zip(chosen, values(chosen), strict=True)
        for a, b in zip(full[number], thin, strict=False)  # a thin batch may end earlier
    ]
    different = [pair for pair in pairs if not torch.equal(*pair)]
    if any(value.isnan().any() for pair in different for value in pair):
        raise _NotANumberError
    return bool(different)
