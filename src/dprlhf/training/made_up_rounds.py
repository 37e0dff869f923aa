"""Startup checks on made-up rows: the largest batches fit, and no user changes another's values.

The largest batches must fit into memory, and a row's floating-point values must not depend on the
contents of the other rows of its batch. Otherwise a user could end the run, or change another
user's contribution by rounding. Both depend on the machine, so both are tried on it, at the run's
own shapes:

- **memory**: sampling and the gradient at the longest prompt, and the gradient of a user with all
  the prompts that a user may have;
- **contents**: a made-up row keeps its place, and its values (the logits that sampling draws from,
  the log-probabilities of responses, what users' contributions are computed from) must keep all
  their bits where the other rows are blank, longer, shorter or of other tokens, and where nothing
  changes at all. Shapes and places are public constants (:mod:`dprlhf.rollout`), so a kernel may
  round by them.

Where a value changes, the run is refused. The adapter has random weights meanwhile, because one
that starts at zero would hide its own rounding. The proof, and what the check cannot see, is in
``docs/proofs/fixed_places.md``.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import clip_factors
from dprlhf.gradients.micro_batches import (
    autograd_of_user,
    check_padding,
    choose_engine,
    disagreement,
    engine_of,
    micro_batches,
    run_pass,
    user_gradients,
)
from dprlhf.policies.causal_lm import CausalLMPolicy, random_adapter
from dprlhf.policies.kept import Keep, Layout, keep
from dprlhf.rollout.batch import Responses, responses_of
from dprlhf.rollout.decoding import decode, try_last_step
from dprlhf.rollout.logprobs import token_logprobs
from dprlhf.rollout.sampling import prompts_at_once, static_steps
from dprlhf.training.processes import Processes


def made_up_prompt(policy: CausalLMPolicy, number: int, longest: int, part: int = 0) -> list[int]:
    """Return random tokens that follow from ``number`` and ``part`` alone."""
    random = np.random.default_rng([7, number, part])
    lengths = longest, 1, 1 + int(random.integers(longest))
    return _tokens(policy, random, lengths[number % 3])


def _tokens(policy: CausalLMPolicy, random: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = random.integers(policy.embeddings, size=count).tolist()
    return tokens


_STEPS = 4  # decoding steps that are compared

_COLUMNS = 4096  # logits of a row that are compared

_FEW = 16  # tokens of a prompt, where its width does not matter

Values = list[list[torch.Tensor]]
"""What is computed of the made-up user at each place; empty for a place without one."""


class Turn(NamedTuple):
    """A turn of sampling, whose shapes are its own."""

    name: str
    width: int  # of what the policy answers, in tokens
    together: int  # responses to a prompt
    lower: str  # the settings by which it takes less memory


@dataclass(frozen=True)
class Shapes:
    """The public numbers that decide the shapes of a run's batches."""

    prompt: int
    response: int
    rows: int  # Number of rows for each prompt of a user
    num_generations: int  # Number of adjacent rows that share a prompt
    prompts: int
    update: Any  # The recipe's update, with its batch_size
    rollout: recipe.Rollout | None = None  # The settings of sampling
    logprobs: bool = True  # Whether contributions depend on log-probabilities of the rows
    keep: Keep | None = None  # What the gradients take of what sampling has computed

    @property
    def sampled_together(self) -> int:
        """The number of responses to a prompt that are sampled from one policy."""
        if self.rollout is None:
            return self.num_generations
        if not self.rollout.shares_prompts:
            return 1
        of_two = self.rollout.base_policy == "reference"
        return self.rollout.responses // 2 if of_two else self.rollout.responses

    @property
    def turns(self) -> list[Turn]:
        """The turns of sampling: the first, and of an agent a later one; none without sampling."""
        if self.rollout is None:
            return []
        lower = "rollout.batch_size or"
        first = Turn(
            "sampling", self.prompt, self.sampled_together, f"{lower} data.max_prompt_tokens"
        )
        if self.rollout.agent is None:
            return [first]
        width = self.prompt + self.response
        later = Turn("sampling of a later turn", width, 1, f"{lower} rollout.max_new_tokens")
        return [first, later]

    @property
    def few(self) -> int:
        """A small width for prompts, where the check is not of shapes."""
        return min(_FEW, self.prompt)


def logits_of(
    policy: CausalLMPolicy, shapes: Shapes, turn: Turn, numbers: Sequence[int | None]
) -> Values:
    """Return each made-up prompt's responses and their logits in the first steps of decoding."""
    assert shapes.rollout is not None
    width = turn.width
    size, together = prompts_at_once(policy, shapes.rollout.batch_size, turn.together)
    steps = min(_STEPS, shapes.response)
    seen: list[torch.Tensor] = []

    def note(last: torch.Tensor) -> None:
        seen.append(last[:, :: -(-last.shape[1] // _COLUMNS)].clone())

    draws = [np.random.default_rng([9, n or 0]).random((together, steps)) for n in numbers]
    kept = None if shapes.keep is None else keep(policy, shapes.keep)
    layout = Layout(size, 1 + width, together, steps)
    sizes = {"size": size, "width": width, "num_generations": together, "max_new_tokens": steps}
    static = static_steps(policy, shapes.rollout, **sizes)
    with contextlib.nullcontext() if kept is None else kept.recording(layout):
        written = decode(
            policy,
            [None if n is None else made_up_prompt(policy, n, width) for n in numbers],
            torch.from_numpy(np.array(draws)),
            width=width,
            static=static,
            watch=note,
        )
    values = [[step.view(size, -1)[place] for step in seen] for place in range(size)]
    for place, steps_of_one in enumerate(values):  # what was drawn from the last logits, too
        own = written[place * together : (place + 1) * together]
        steps_of_one.insert(0, torch.tensor([token for response in own for token in response]))
        if kept is not None:
            of_one = (x[place].flatten() for x in kept.batches[0].values())
            steps_of_one += [x[:: -(-len(x) // _COLUMNS)].clone() for x in of_one]
    return values


def check_gradients(policy: CausalLMPolicy, shapes: Shapes) -> None:
    """Let the policy differentiate users one at a time, where a pass with two of them errs."""
    rows = _made_up(policy, shapes, [0, 2], width=shapes.few)
    check_padding(policy, rows)
    if isinstance(shapes.update, recipe.PPO):
        _check_copies(policy, rows, shapes.update)
        return
    choose_engine(policy, rows, _weights(rows), shapes.update.batch_size)


def _check_copies(policy: CausalLMPolicy, rows: Responses, update: recipe.PPO) -> None:
    """Refuse PPO where its copies are not what the model reads: they would get noise alone.

    Experts, for example, read the weights of their LoRA and never call it.
    """
    from dprlhf.updates.ppo import LOCAL_LEARNING_RATE, train_copies

    weights, alone = _weights(rows), policy.mixes_rows is not None
    batch = next(micro_batches(rows, update.batch_size, alone=alone))
    once = update.model_copy(update={"epochs": 1, "clip_range": None})
    of_tokens = np.repeat(weights[:, None], rows.max_new_tokens, axis=1)
    moves = train_copies(policy, rows, of_tokens, batch, once, math.inf) / LOCAL_LEARNING_RATE
    for user, move in zip(batch.users.tolist(), moves, strict=True):
        if user < 0:
            continue
        passes = [autograd_of_user(policy, rows, weights, one, user) for one in batch.passes()]
        expected = torch.stack(passes).sum(0)
        if name := disagreement(policy, move.to(expected), expected):
            raise DprlhfError(
                f"update.name ppo trains a copy of the adapter for each user, and the model reads"
                f" {name!r} without calling it: choose other target_modules, or take pg or grpo"
            )


def gradients_of(policy: CausalLMPolicy, shapes: Shapes, numbers: Sequence[int | None]) -> Values:
    """Return what each made-up user's contribution is computed from."""
    values: Values = [[] for _ in numbers]
    for users, tensors in contributions(policy, shapes, numbers):
        for place, user in enumerate(users.tolist()):
            if user >= 0:
                values[user].extend(tensor[place].clone() for tensor in tensors)
    return values


def logprobs_of(policy: CausalLMPolicy, shapes: Shapes, numbers: Sequence[int | None]) -> Values:
    """Return the log-probabilities of each made-up user's responses."""
    rows = _made_up(policy, shapes, numbers)
    values = torch.from_numpy(token_logprobs(policy, rows, shapes.update.batch_size))
    return [[values[torch.from_numpy(rows.user == user)]] for user in range(len(numbers))]


@torch.no_grad()
def distance_by_padding(policy: CausalLMPolicy, shapes: Shapes) -> float:
    """Return how far a token's distribution moves by padding and the cache.

    A made-up prompt that fills half of its width is answered in a few steps; the model's logits on
    the sequence as it is are compared with those of the steps, and of a padded gradient pass.
    """
    width, steps = shapes.few, min(_STEPS, shapes.response)
    prompt = made_up_prompt(policy, 0, width)[: -(-width // 2)]
    draws = torch.from_numpy(np.random.default_rng(10).random((1, 1, steps)))
    seen: list[torch.Tensor] = []
    [response] = decode(
        policy, [prompt], draws, width=width, watch=lambda x: seen.append(x.clone())
    )
    row = torch.tensor([prompt + response], device=policy.device)
    padded = F.pad(row, (width - len(prompt), 0))
    mask = F.pad(torch.ones_like(row), (width - len(prompt), 0))
    inputs = policy.inputs_of(padded, mask, len(response), 1)
    # The last token predicts nothing.
    plain = policy.model(input_ids=row[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    of_pass = policy.model(**inputs, use_cache=False).logits[0, -len(response) :]
    expected = plain.float().softmax(1)
    distributions = (x.float().softmax(1) for x in (torch.cat(seen[: len(response)]), of_pass))
    return max(float((x - expected).abs().sum(1).mean() / 2) for x in distributions)


def contributions(
    policy: CausalLMPolicy,
    shapes: Shapes,
    numbers: Sequence[int | None],
    prompts: int = 1,
) -> Iterator[tuple[NDArray[np.int64], list[torch.Tensor]]]:
    """Yield users, −1 for a filler, and what the update computes their contributions from.

    These are tensors ``[users, ...]``.
    """
    rows = _made_up(policy, shapes, numbers, prompts)
    update, size = shapes.update, shapes.update.batch_size
    oracle = getattr(update, "least_squares", None)
    if shapes.keep is not None and prompts == 1:
        rows = _with_outputs(policy, rows, size, shapes.keep)
    weights = _weights(rows)
    if isinstance(update, recipe.PPO):
        from dprlhf.updates.ppo import train_copies

        quick = update.model_copy(update={"epochs": 1})
        of_tokens = np.repeat(weights[:, None], rows.max_new_tokens, axis=1)
        for batch in micro_batches(rows, size, alone=policy.mixes_rows is not None):
            yield batch.users, [train_copies(policy, rows, of_tokens, batch, quick, 1.0)]
    elif oracle is not None or getattr(update, "subspace", None) is not None:
        # An oracle takes a user's examples one by one, and a subspace all of its rows together.
        part = None if oracle is None else 2 if isinstance(update, recipe.REBEL) else 1
        for users, _, gradients, _ in user_gradients(
            policy, rows, weights, batch_size=size, rows=part
        ):
            yield users, [gradients]
            if oracle is not None and prompts > 1:  # the further passes need no more memory
                return
    else:
        yield from recorded_by_user(policy, rows, weights, batch_size=size)


def recorded_by_user(
    policy: CausalLMPolicy, rows: Responses, weights: NDArray[np.float64], *, batch_size: int
) -> Iterator[tuple[NDArray[np.int64], list[torch.Tensor]]]:
    """Yield users and what :func:`clipped_sum` computes their part of the sum from.

    It differentiates, takes norms and sums as that does, and drops the sum. Of a user in several
    passes it makes the first two, and all only where each further one needs more memory.
    """
    engine = engine_of(policy)
    device = "cpu" if policy.device.type == "mps" else policy.device
    for batch in micro_batches(rows, batch_size, alone=engine.alone):
        for number, part in enumerate(batch.passes()):
            if number < 2 or engine.grows:
                run_pass(engine, policy, rows, weights, part, more=number > 0)
        yield batch.users, engine.recorded()
        norms, _ = engine.norms()
        total = torch.zeros(policy.dimension, dtype=torch.float64, device=device)
        engine.add_weighted_sum(clip_factors(norms, 1.0), total)


def _weights(rows: Responses) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.cos(rows.tokens.sum(1).numpy().astype(np.float64))
    return weights


@torch.no_grad()
def _with_outputs(
    policy: CausalLMPolicy, rows: Responses, batch_size: int, what: Keep
) -> Responses:
    """Return the rows with layer outputs for the gradients to reuse, as if sampling had kept them.

    They are computed at the shapes of the gradients, so these are checked with and without them.
    """
    kept = keep(policy, what)
    assert kept is not None
    length, width = rows.max_new_tokens, rows.width
    for batch in (part for whole in micro_batches(rows, batch_size) for part in whole.passes()):
        shared = rows.shared_rows(policy, batch.height // len(batch.users))
        columns = width if shared > 1 else 1 + width
        with kept.recording(Layout(batch.height // shared, columns, shared, length)):
            tokens, mask = (t.to(policy.device) for t in rows.micro_batch(batch.rows))
            inputs = policy.inputs_of(tokens, mask, length, shared)
            policy.model(**inputs, use_cache=False)
        kept.assign_rows(batch.rows, len(rows.user))
    return Responses(**{**vars(rows), "kept": kept})


def _made_up(
    policy: CausalLMPolicy,
    shapes: Shapes,
    numbers: Sequence[int | None],
    prompts: int = 1,
    width: int | None = None,  # Tokens of a prompt; None for those of the shapes
) -> Responses:
    """Return rows of random tokens, a user for each number; they follow from that number alone."""
    width, length, together = width or shapes.prompt, shapes.response, shapes.num_generations
    each, present = prompts * shapes.rows, [n for n in numbers if n is not None]
    given: list[list[int]] = []
    written: list[list[int]] = []
    for number in present:
        random = np.random.default_rng([8, number])
        for own in range(each):
            given.append(made_up_prompt(policy, number, width, own // together))
            response = _tokens(policy, random, 1 + int(random.integers(length)) if own else length)
            # A classifier's answer is the number of a label.
            written.append([0] if length == 1 else response)
    places = np.array([place for place, n in enumerate(numbers) if n is not None], dtype=np.int64)
    users = np.repeat(places, prompts)
    slots = np.tile(np.arange(prompts), len(places))
    asked = Prompts(
        [""] * len(users),
        users,
        slots,
        {},
        round_users=np.arange(len(numbers)),
        prompts_a_user=prompts,
    )
    return responses_of(
        asked,
        shapes.rows,
        given,
        written,
        width=width,
        length=length,
        padding=policy.tokenizer.pad_token_id,
        num_generations=together,
    )


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
    phases = ["sampling, "] * (shapes.rollout is not None)
    phases += ["log-probabilities, "] * shapes.logprobs
    count = torch.get_num_threads()
    threads = f"{count} thread" + "s" * (count > 1)
    return (
        "checked at start on this machine (and again at each resume): made-up rows, each at its"
        " place, gave the same bits with blank, longer, shorter and other rows around them, and"
        f" when computed again, in {''.join(phases)}gradients, on {policy.device.type} with"
        f" {threads}, at prompts of {shapes.prompt} tokens"
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
        logprobs = partial(logprobs_of, policy, shapes)
        if shapes.logprobs and (how := _dependence(size, logprobs)):
            return f"log-probabilities: {how}"
    return None


def _dependence(size: int, values: Callable[[Sequence[int | None]], Values]) -> str:
    """Return in words how values of made-up users depend on the others; empty where they do not."""
    everyone = list(range(size))
    full = values(everyone)
    # Half of the users beside blank rows, the other half beside those of other users.
    blank = [n if n % 2 == 0 else None for n in everyone]
    other = [n if n % 2 else size + 1 + n for n in everyone]
    beside_blank = _differ(full, values(blank), everyone[::2])
    if not beside_blank and not _differ(full, values(other), everyone[1::2]):
        return ""
    if _differ(full, values(everyone), everyone):
        return "the same rows give other bits each time"
    return "on this machine a row's bits depend on what the other rows contain"


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
