"""A round's computations on made-up users, to check whether rows of a batch affect each other.

The values are those of a run's own phases, at its own shapes: the logits that sampling draws from,
the log-probabilities of responses, and what users' contributions are computed from.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dprlhf import recipe
from dprlhf.gradients.clipping import recorded_by_user
from dprlhf.gradients.engine_check import check_padding, choose_engine
from dprlhf.gradients.micro_batches import micro_batches, user_gradients
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.kept import Layout, keep
from dprlhf.rollout import Responses
from dprlhf.rollout.batch import padded_width
from dprlhf.rollout.decoding import decode
from dprlhf.rollout.logprobs import token_logprobs
from dprlhf.rollout.made_up import made_up_prompt, made_up_responses
from dprlhf.rollout.sampling import prompts_at_once
from dprlhf.rollout.static_steps import StaticSteps

_STEPS = 4  # decoding steps that are compared

_COLUMNS = 4096  # logits of a row that are compared


@dataclass(frozen=True)
class Shapes:
    """The public numbers that decide the shapes of a run's batches.

    Attributes:
        prompt: The longest prompt, in tokens.
        response: The longest response, in tokens.
        rows: Number of rows for each prompt of a user.
        num_generations: Number of adjacent rows that share a prompt.
        prompts: The most prompts of a user.
        update: The recipe's update, with its ``batch_size``.
        rollout: The settings of sampling; None where this process samples nothing.
        keeps: Whether the gradients take what sampling has computed.
    """

    prompt: int
    response: int
    rows: int
    num_generations: int
    prompts: int
    update: Any
    rollout: recipe.Rollout | None = None
    keeps: bool = False

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
    def widths(self) -> list[int]:
        """The narrowest and the widest padded prompt."""
        return sorted({int(padded_width(1, self.prompt)), self.prompt})

    def alone(self) -> Shapes:
        """Return the shapes of a layout in which a micro-batch has one prompt of one user."""
        size, rollout = {"batch_size": self.sampled_together}, self.rollout
        if rollout is not None:
            # The later turns of an agent's responses are contexts of their own.
            single = {"batch_size": 1} if rollout.agent is not None else size
            rollout = rollout.model_copy(update=single)
        return Shapes(
            **{**vars(self), "update": self.update.model_copy(update=size), "rollout": rollout}
        )


def sampled_rows(rollout: recipe.Rollout) -> int:
    """Return the number of rows in a micro-batch of sampling, which is settled by now."""
    assert rollout.batch_size != "auto"
    return rollout.batch_size


def logits_of(
    policy: CausalLMPolicy,
    shapes: Shapes,
    numbers: Sequence[int],
    width: int,
    context: int | None = None,
) -> list[list[torch.Tensor]]:
    """Return each made-up prompt's responses and their logits in the first steps of decoding.

    Args:
        policy: The policy.
        shapes: The shapes of the run.
        numbers: Numbers of the made-up users.
        width: The padded width of what stands before.
        context: The longest context of an agent's later turn, which has one response; None for
            prompts.
    """
    assert shapes.rollout is not None
    size, together = prompts_at_once(sampled_rows(shapes.rollout), shapes.sampled_together)
    if context is not None:
        size, together = sampled_rows(shapes.rollout), 1
    steps = min(_STEPS, shapes.response)
    seen: list[torch.Tensor] = []

    def note(last: torch.Tensor) -> None:
        seen.append(last[:, :: -(-last.shape[1] // _COLUMNS)].clone())

    draws = [np.random.default_rng([9, number]).random((together, steps)) for number in numbers]
    kept = keep(policy, gradients=True) if shapes.keeps and context is None else None
    layout = Layout(size, 1 + width, together, steps)
    static = static_steps(
        policy, shapes, size=size, width=width, num_generations=together, max_new_tokens=steps
    )
    with contextlib.nullcontext() if kept is None else kept.recording(layout):
        written = decode(
            policy,
            [made_up_prompt(policy, n, width, context or shapes.prompt) for n in numbers],
            torch.from_numpy(np.array(draws)),
            size=size,
            width=width,
            static=static,
            watch=note,
        )
    found = [[step.view(size, -1)[place] for step in seen] for place in range(len(numbers))]
    for place, steps_of_one in enumerate(found):  # what was drawn from the last logits, too
        own = written[place * together : (place + 1) * together]
        steps_of_one.insert(0, torch.tensor([token for response in own for token in response]))
        if kept is not None:
            of_one = (x[place].flatten() for x in kept.batches[0].values())
            steps_of_one += [x[:: -(-len(x) // _COLUMNS)].clone() for x in of_one]
    return found


def static_steps(policy: CausalLMPolicy, shapes: Shapes, **sizes: int) -> StaticSteps | None:
    """Return the run's steps over fixed tensors; None where its steps grow."""
    assert shapes.rollout is not None
    return StaticSteps(policy, **sizes) if shapes.rollout.cuda_graphs else None


def check_gradients(policy: CausalLMPolicy, shapes: Shapes) -> None:
    """Let the policy's users be differentiated one at a time, where a pass with two of them errs.

    Raises:
        DprlhfError: A trained parameter has no part in the loss, or lets padding into it.
    """
    rows = _made_up(policy, shapes, [0, 1], shapes.widths[0], 1)
    check_padding(policy, rows)
    if isinstance(shapes.update, recipe.PPO):
        return  # it trains copies of its own, of layers that it knows
    choose_engine(policy, rows, _weights(rows), shapes.update.batch_size)


def gradients_of(
    policy: CausalLMPolicy, shapes: Shapes, numbers: Sequence[int], width: int
) -> list[list[torch.Tensor]]:
    """Return what each made-up user's contribution is computed from."""
    found: dict[int, list[torch.Tensor]] = {}
    for users, tensors in contributions(policy, shapes, numbers, width):
        for place, user in enumerate(users.tolist()):
            found.setdefault(user, []).extend(tensor[place].clone() for tensor in tensors)
    return [found[user] for user in range(len(numbers))]


def logprobs_of(
    policy: CausalLMPolicy, shapes: Shapes, numbers: Sequence[int], width: int
) -> list[list[torch.Tensor]]:
    """Return the log-probabilities of each made-up user's responses."""
    rows = _made_up(policy, shapes, numbers, width, 1)
    found = torch.from_numpy(token_logprobs(policy, rows, shapes.update.batch_size))
    return [[found[torch.from_numpy(rows.user == user)]] for user in range(len(numbers))]


@torch.no_grad()
def distance_by_padding(policy: CausalLMPolicy, shapes: Shapes) -> float:
    """Return how far a token's distribution moves by padding and the cache.

    A made-up prompt that fills half of its width is answered in a few steps; the model's logits on
    the sequence as it is are compared with those of the steps, and of a padded gradient pass.

    Returns:
        The larger of the two total variation distances, means over tokens, from 0 to 1.
    """
    width, steps = shapes.widths[0], min(_STEPS, shapes.response)
    prompt = made_up_prompt(policy, 0, width, shapes.prompt)[: -(-width // 2)]
    draws = torch.from_numpy(np.random.default_rng(10).random((1, 1, steps)))
    seen: list[torch.Tensor] = []
    [response] = decode(
        policy, [prompt], draws, size=1, width=width, watch=lambda x: seen.append(x.clone())
    )
    row = torch.tensor([prompt + response], device=policy.device)
    padded = F.pad(row, (width - len(prompt), 0))
    mask = F.pad(torch.ones_like(row), (width - len(prompt), 0))
    inputs = policy.inputs_of(padded, mask, len(response), 1)
    # The last token predicts nothing.
    plain = policy.model(input_ids=row[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    of_pass = policy.model(**inputs, use_cache=False).logits[0, -len(response) :]
    expected = plain.float().softmax(1)
    found = (x.float().softmax(1) for x in (torch.cat(seen[: len(response)]), of_pass))
    return max(float((x - expected).abs().sum(1).mean() / 2) for x in found)


def contributions(
    policy: CausalLMPolicy,
    shapes: Shapes,
    numbers: Sequence[int],
    width: int,
    prompts: int = 1,
) -> Iterator[tuple[NDArray[np.int64], list[torch.Tensor]]]:
    """Yield users and what the update computes their contributions from, ``[users, ...]`` each."""
    rows = _made_up(policy, shapes, numbers, width, prompts)
    update, size = shapes.update, shapes.update.batch_size
    if shapes.keeps and prompts == 1:
        rows = _with_outputs(policy, rows, size)
    weights = _weights(rows)
    if isinstance(update, recipe.PPO):
        from dprlhf.updates.ppo import train_copies

        quick = update.model_copy(update={"epochs": 1, "minibatches": 1})
        of_tokens = np.repeat(weights[:, None], rows.max_new_tokens, axis=1)
        for batch in micro_batches(rows, size):
            yield batch.users, [train_copies(policy, rows, of_tokens, batch, quick, 1.0, None)]
    elif getattr(update, "least_squares", None) is not None:
        part = 2 if isinstance(update, recipe.REBEL) else 1
        for users, gradients, _ in user_gradients(
            policy, rows, weights, batch_size=size, rows=part
        ):
            yield users, [gradients]
            if prompts > 1:  # the further passes need no more memory
                return
    elif getattr(update, "subspace", None) is not None:
        for users, gradients, _ in user_gradients(
            policy, rows, weights, batch_size=size, rows=None
        ):
            yield users, [gradients]
    else:
        yield from recorded_by_user(policy, rows, weights, batch_size=size)


def _weights(rows: Responses) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.cos(rows.tokens.sum(1).numpy().astype(np.float64))
    return weights


@torch.no_grad()
def _with_outputs(policy: CausalLMPolicy, rows: Responses, batch_size: int) -> Responses:
    """Return the rows with layer outputs for the gradients to reuse, as if sampling had kept them.

    They are computed at the shapes of the gradients, so these are checked with and without them.
    """
    kept = keep(policy, gradients=True)
    assert kept is not None
    length = rows.max_new_tokens
    for batch in (part for whole in micro_batches(rows, batch_size) for part in whole.parts()):
        tokens, mask = rows.micro_batch(batch.rows, batch.width, batch.height)
        together = math.gcd(rows.num_generations, batch.height // batch.size)
        shared = policy.shared_rows(together, batch.width, length)
        columns = batch.width if shared > 1 else 1 + batch.width
        with kept.recording(Layout(batch.height // shared, columns, shared, length)):
            inputs = policy.inputs_of(
                tokens.to(policy.device), mask.to(policy.device), length, shared
            )
            policy.model(**inputs, use_cache=False)
        kept.found(batch.rows, len(rows.user))
    return Responses(**{**vars(rows), "kept": kept})


def _made_up(
    policy: CausalLMPolicy, shapes: Shapes, numbers: Sequence[int], width: int, prompts: int
) -> Responses:
    return made_up_responses(
        policy,
        numbers,
        rows=shapes.rows,
        num_generations=shapes.num_generations,
        width=width,
        longest=shapes.prompt,
        length=shapes.response,
        prompts=prompts,
    )
