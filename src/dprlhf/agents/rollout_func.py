"""TRL's ``rollout_func``: a function of the program that makes a user's responses itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dprlhf import recipe
from dprlhf.agents.agent import OwnRandomness
from dprlhf.agents.packing import Row, packed, to_one_line_error
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.privacy.randomness import uint64_stream
from dprlhf.rewards.isolation import SecretSink, captured, kept_process_state
from dprlhf.rollout.batch import Responses, Tick

RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]
"""``rollout_func(prompts, trainer)``, with each prompt as often as it is to be answered."""

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")


class FunctionSampler:
    """Calls a ``rollout_func`` once for each user; a :class:`~dprlhf.rollout.sampling.Sampler`.

    TRL calls it with the prompts of a whole batch. Here it gets **one user's prompts at a time**,
    each as often as there are responses to it, in generators of Python, NumPy and PyTorch that are
    the user's own: what it returns for a user cannot depend on the others, unless the function
    keeps something from call to call.

    ``logprobs`` have to be there and are not used: the update computes its own.

    Args:
        function: The function.

    Attributes:
        sink: Receiver of the text that the function prints on private prompts; None drops it.

    Raises:
        DprlhfError: It cannot be called.
    """

    def __init__(self, function: RolloutFunc) -> None:
        if not callable(function):
            raise DprlhfError(f"rollout_func: give a function, not a {type(function).__name__}")
        self.function = function
        self.sink: SecretSink | None = None
        self._names: set[str] | None = None

    def attach(self, policy: CausalLMPolicy, max_prompt_tokens: int) -> None:
        """Let the function make the policy's responses."""
        policy.tools, policy.sampler = (), self

    def __call__(
        self,
        policy: CausalLMPolicy,
        prompts: Prompts,
        spec: recipe.Rollout,
        *,
        key: bytes,
        context: tuple[str | int, ...],
        max_prompt_tokens: int,
        tick: Tick | None,
        private: bool,
    ) -> Responses:
        """Return the responses to each prompt that the function made.

        Raises:
            DprlhfError: On public prompts, the function fails or returns something else.
        """
        k = spec.responses
        rows: list[Row | None] = [None] * (len(prompts) * k)
        trainer = _view(policy, spec)
        for user in np.unique(prompts.users):
            places = np.flatnonzero(prompts.users == user)
            seed = uint64_stream(key, *context, int(user), "rollout_func", count=1) >> np.uint64(1)
            asked = [prompts.prompts[p] for p in places for _ in range(k)]
            own = OwnRandomness(int(seed[0]))
            with captured(self.sink) if private else kept_process_state():
                made = self._made(policy, asked, trainer, own, private=private)
            for number, row in enumerate(made):
                rows[places[number // k] * k + number % k] = row
            if tick is not None:
                tick(len(made))
        names = sorted(self._names or ())
        return packed(
            policy,
            prompts,
            [row for row in rows if row is not None],
            from_base=np.zeros(len(rows), dtype=bool),
            spec=spec,
            longest=max_prompt_tokens,
            num_generations=1,
            extra=names,
        )

    def _made(
        self,
        policy: CausalLMPolicy,
        asked: list[Any],
        trainer: Any,
        own: OwnRandomness,
        *,
        private: bool,
    ) -> list[Row]:
        try:
            with own(), torch.no_grad():
                output = dict(self.function([copy.deepcopy(prompt) for prompt in asked], trainer))
            return self._read(policy, output, len(asked), private=private)
        except BaseException as problem:
            if not private:
                raise to_one_line_error(problem) from None
            return [Row([], [], [], failed=True) for _ in asked]

    def _read(
        self, policy: CausalLMPolicy, output: dict[str, Any], count: int, *, private: bool
    ) -> list[Row]:
        missing = [name for name in _NEEDED if name not in output]
        if missing:
            raise DprlhfError(f"rollout_func: its result has no {missing[0]!r}")
        prompt_ids, completion_ids = output.pop("prompt_ids"), output.pop("completion_ids")
        del output["logprobs"]
        masks = output.pop("env_mask", None)
        if masks is None:
            masks = [[1] * len(ids) for ids in completion_ids]
        lengths = {len(prompt_ids), len(completion_ids), len(masks)}
        if lengths != {count}:
            raise DprlhfError(
                f"rollout_func: {count} prompts were given, and prompt_ids, completion_ids and"
                f" env_mask have {', '.join(map(str, sorted(lengths)))} rows"
            )
        # Which names there are may not depend on other users: rewards are called with all of them.
        if not private:
            self._names = set(output)
        elif set(output) != self._names:
            raise DprlhfError("rollout_func: its result has other fields than on public prompts")
        size = policy.model.get_input_embeddings().weight.shape[0]
        rows = []
        for number in range(count):
            prompt, tokens, own = (
                [int(n) for n in part[number]] for part in (prompt_ids, completion_ids, masks)
            )
            if not all(0 <= token < size for token in prompt + tokens) or len(own) != len(tokens):
                raise DprlhfError("rollout_func: a row's ids are no tokens, or its mask is shorter")
            extra = {name: _of_row(values, number, count) for name, values in output.items()}
            rows.append(Row(prompt, tokens, [int(n != 0) for n in own], extra=extra))
        return rows


def _of_row(values: Any, number: int, count: int) -> Any:
    """Return a row's value; one that is no list of this length holds for all rows, as in TRL."""
    each = isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count
    return values[number] if each else values


def _view(policy: CausalLMPolicy, spec: recipe.Rollout) -> Any:
    """Return what a ``rollout_func`` may use of a trainer, under TRL's names."""
    settings = {
        "num_generations": spec.responses,
        "max_completion_length": spec.max_new_tokens,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "min_p": spec.min_p,
        "repetition_penalty": spec.repetition_penalty,
    }
    return SimpleNamespace(
        model=policy.model,
        processing_class=policy.tokenizer,
        args=SimpleNamespace(**settings),
        accelerator=SimpleNamespace(device=policy.device, unwrap_model=lambda model: model),
        use_vllm=False,
        num_generations_eval=spec.responses,
        chat_template_kwargs=policy.chat_template_kwargs,
        **settings,
    )
