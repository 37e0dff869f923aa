"""What the frozen layers computed while responses were sampled, kept for the gradient pass.

Products of the frozen linear layers are most of the work. The forward pass of the gradients takes
the kept ones; norms, attention and the trainable layers are computed as ever. Below the lowest
trained layer nothing is computed, since its input is kept; it depends on no trained parameter, so
it serves the base policy, too. While an adapter adds nothing yet, all that was kept does. What is
kept of a row is a function of that row alone, wherever sampling keeps rows apart. Where there is no
memory for all of it, the logits and that input are kept, or this input alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dprlhf.hardware import memory_bytes
from dprlhf.policies import shared_prompt

Keep = Literal["outputs", "logits", "input"]
"""Outputs of all frozen layers from the lowest trained one on, or the logits; and its input."""

_INPUT, _HEAD = "input", "head"


@dataclass(frozen=True)
class Layout:
    """The shape of a micro-batch of sampling."""

    prompts: int  # Number of prompts, fillers included
    columns: int  # Number of columns of a prompt, padding included
    together: int  # Number of responses to each prompt
    length: int  # Length of a response in tokens


@dataclass(frozen=True)
class _Parts:
    """The layers of a policy whose outputs are kept."""

    skipped: list[nn.Module]
    lowest: nn.Module
    linear: dict[str, nn.Module]
    head: nn.Module


def parts_of(policy: Any) -> _Parts | None:
    """Return the layers to keep outputs of; None for a model that is not tested for it."""
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    network = policy.network
    if not isinstance(network, PreTrainedModel):
        return None  # such as the bandit of an audit
    if any(isinstance(p, DTensor) for p in network.parameters()):
        return None  # of a sharded model a process has parts of the weights
    if shared_prompt.patched(network):
        return None
    head = network.get_output_embeddings()
    if not shared_prompt.supported(network.config) or policy.checkpointed or not _linear(head):
        return None
    layers = [m for m in network.modules() if isinstance(m, GradientCheckpointingLayer)]
    trained = {id(p) for p in policy.parameters.values()}
    own = [[p for p in layer.parameters() if id(p) in trained] for layer in layers]
    if sum(map(len, own)) != len(trained):
        return None  # something is trained outside of the layers
    lowest = next(number for number, parameters in enumerate(own) if parameters)
    names = {module: name for name, module in network.named_modules()}
    linear = {
        names[module]: module
        for layer in layers[lowest:]
        for module in layer.modules()
        if _linear(module)
        and not any(id(p) in trained for p in module.parameters())
        and "lora_" not in names[module]
    }
    return _Parts(layers[:lowest], layers[lowest], linear, head)


def _linear(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return getattr(type(module), "forward", None) in (nn.Linear.forward, Conv1D.forward)


def room_for(
    policy: Any, *, rows: float, prompt: int, response: int, together: int, most: Keep = "outputs"
) -> Keep | None:
    """Return the most that sampling can keep in an eighth of the device's memory."""
    # From public numbers, since it decides how gradients are rounded. A round may have more rows
    # than are expected, which the other seven eighths allow for.
    parts = parts_of(policy)
    if parts is None:
        return None
    weight = policy.model.get_input_embeddings().weight
    tokens = (1 + prompt) / together + response
    of_input = tokens * weight.shape[1] if parts.skipped else 0
    of_logits = of_input + response * _outputs(parts.head)
    of_layers = of_logits + tokens * sum(map(_outputs, parts.linear.values()))
    sizes: dict[Keep, float] = {"outputs": of_layers, "logits": of_logits, "input": of_input}
    for kind in list(sizes)[list(sizes).index(most) :]:
        numbers = rows * sizes[kind]
        if 0 < numbers * weight.element_size() <= memory_bytes(policy.device) / 8:
            return kind
    return None


def _outputs(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0 if isinstance(module, nn.Linear) else 1]


@dataclass(eq=False, repr=False)
class Kept:
    """Layer outputs and logits of one call of sampling, stored by micro-batch."""

    parts: _Parts  # The layers, from :func:`parts_of`
    state: dict[str, torch.Tensor] | None  # parameters sampled with; None for the base policy
    base: bool  # whether the base policy computes the same
    what: Keep
    # Of each micro-batch, outputs at each token by layer, [prompts, columns + responses ·
    # (length − 1), outputs], and the logits, [prompts, responses, length, vocabulary].
    batches: list[dict[str, torch.Tensor]] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    # The micro-batch of each row, −1 before it is sampled, and its response's number in it, [rows].
    batch: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    place: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @contextlib.contextmanager
    def recording(self, layout: Layout) -> Iterator[None]:
        """Keep what one micro-batch of sampling, or a pass over prompts and responses, computes."""
        recorded: dict[str, torch.Tensor] = {}
        calls: dict[str, int] = {}
        watched = self.parts.linear if self.what == "outputs" else {}
        hooks = [
            module.register_forward_hook(_keeping(name, layout, recorded, calls))
            for name, module in watched.items()
        ]
        of_head = _counting if self.what == "input" else partial(_keeping, _HEAD, layout, recorded)
        hooks.append(self.parts.head.register_forward_hook(of_head(calls)))
        keep = _keeping(_INPUT, layout, recorded, calls)

        def before(module: Any, args: Any, kwargs: Any) -> None:
            keep(module, args, args[0] if args else kwargs["hidden_states"])

        if self.parts.skipped:
            hooks.append(self.parts.lowest.register_forward_pre_hook(before, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        # A layer that is called otherwise than once for all tokens is computed again.
        steps = calls.get(_HEAD, 0)
        self.batches.append({name: x for name, x in recorded.items() if calls[name] == steps})
        self.layouts.append(layout)

    def assign_rows(self, rows: NDArray[np.int64], count: int) -> None:
        """Record which rows the responses of the last micro-batch belong to."""
        if not len(self.batch):
            self.batch, self.place = np.full((2, count), -1)
        real = np.flatnonzero(rows >= 0)
        self.batch[rows[real]], self.place[rows[real]] = len(self.batches) - 1, real

    def take(self, rows: NDArray[np.int64]) -> Kept:
        """Return what is kept of these rows, in this order."""
        return Kept(**{**vars(self), "batch": self.batch[rows], "place": self.place[rows]})

    def has_logits(self, policy: Any) -> bool:
        """Return whether the policy's own logits have been kept."""
        return self.what != "input" and self.fits(policy)

    def fits(self, policy: Any) -> bool:
        """Return whether the policy still has the parameters that computed the kept outputs."""
        if policy.is_base:
            return self.base
        if self.state is None:
            return False
        # Read once: to read each of hundreds of answers would wait for the accelerator each time.
        same = [(self.state[name] == p).all() for name, p in policy.parameters.items()]
        return bool(torch.stack(same).all())


def keep(policy: Any, what: Keep) -> Kept | None:
    """Return an empty store for the outputs that sampling computes; None for an untested model."""
    parts = parts_of(policy)
    if parts is None:
        return None
    state = {name: p.detach().clone() for name, p in policy.parameters.items()}
    base = policy.is_base or _adds_nothing(policy)
    return Kept(parts, None if policy.is_base else state, base, what)


def _adds_nothing(policy: Any) -> bool:
    """Return whether the policy is one of LoRA whose products B·A are all zero, as at its start."""
    factors = (".lora_A.", ".lora_B.")
    if not all(any(factor in name for factor in factors) for name in policy.parameters):
        return False  # such as DoRA's lengths, with which an unchanged weight is rounded again
    last = [p for name, p in policy.model.named_parameters() if ".lora_B." in name]
    return not any(bool(p.any()) for p in last)


def _keeping(
    name: str, layout: Layout, recorded: dict[str, torch.Tensor], calls: dict[str, int]
) -> Callable[[Any, Any, torch.Tensor], None]:
    """Return a forward hook that stores a layer's output: of the prompts, then of each step."""
    size, columns, together = layout.prompts, layout.columns, layout.together
    own = layout.length - 1

    def keeping(module: Any, args: Any, output: torch.Tensor) -> None:
        if calls.get(name, 0) < 0:
            return
        calls[name] = step = calls.get(name, 0) + 1
        # The head comes first: as many columns as responses would make its shape a layer's.
        if name == _HEAD and step == 1 and output.shape[:2] == (size, together * (own + 1)):
            recorded[name] = output.view(size, together, own + 1, -1)
        elif name != _HEAD and step == 1 and output.shape[:2] == (size, columns + together * own):
            recorded[name] = output
        elif name == _HEAD:
            if step == 1:
                recorded[name] = output.new_zeros(size, together, own + 1, output.shape[-1])
            recorded[name][:, :, step - 1] = output.view(size, -1, output.shape[-1])
        elif step == 1 and output.shape[:2] == (size, columns):
            recorded[name] = output.new_zeros(size, columns + together * own, output.shape[-1])
            recorded[name][:, :columns] = output
        elif name in recorded and step <= own + 1 and output.shape[:-1].numel() == size * together:
            of_steps = recorded[name][:, columns:].view(size, together, own, output.shape[-1])
            of_steps[:, :, step - 2] = output.view(size, together, -1)
        else:  # not the layer's output at each token
            calls[name] = -1

    return keeping


def _counting(calls: dict[str, int]) -> Callable[..., None]:
    """Return a forward hook that counts the calls of the head, which are those of the model."""

    def counting(*_: Any) -> None:
        calls[_HEAD] = calls.get(_HEAD, 0) + 1

    return counting


class Replay:
    """What is kept of some rows, as outputs of the layers in a forward pass over these rows.

    Every output is copied into a new tensor of the pass' shape, zero on fillers and padding: how it
    is rounded may not depend on what is beside it in memory.
    """

    def __init__(
        self,
        kept: Kept,
        rows: NDArray[np.int64],
        *,
        width: int,
        length: int,
        shared_rows: int,
    ) -> None:
        self.kept, self._own, self._shared = kept, length - 1, shared_rows
        self._inputs = len(rows) // shared_rows
        # Rows that share no prompt have a column of padding in front.
        self._columns = width if shared_rows > 1 else 1 + width
        self._place, batch = kept.place[rows], np.where(rows < 0, -1, kept.batch[rows])
        some = np.unique(batch[rows >= 0]).tolist()
        self._rows = [(b, np.flatnonzero(batch == b)) for b in some]

    def of_tokens(self, name: str) -> torch.Tensor:
        """Return a layer's output, ``[inputs, columns + own tokens, outputs]``."""
        columns, own, shared = self._columns, self._own, self._shared
        some = next(iter(self.kept.batches))[name]
        taken = some.new_zeros(self._inputs, columns + shared * own, some.shape[-1])
        of_responses = taken[:, columns:].view(self._inputs, shared, own, some.shape[-1])
        for number, rows in self._rows:
            kept, layout = self.kept.batches[number][name], self.kept.layouts[number]
            prompt, response = np.divmod(self._place[rows], layout.together)
            width = min(columns, layout.columns)
            to, place = np.divmod(rows, shared)
            first = place == 0
            prompts = kept[:, layout.columns - width : layout.columns]
            taken[_at(to[first]), columns - width : columns] = prompts[_at(prompt[first])]
            steps = kept[:, layout.columns :].view(
                layout.prompts, layout.together, own, kept.shape[-1]
            )
            if shared == layout.together and np.array_equal(place, response):
                of_responses[_at(to[first])] = steps[_at(prompt[first])]
            else:
                of_responses[to, place] = steps[prompt, response]
        return taken

    def of_logits(self) -> torch.Tensor:
        """Return the logits, ``[inputs, responses · length, vocabulary]``."""
        some = next(iter(self.kept.batches))[_HEAD]
        taken = some.new_zeros(self._inputs * self._shared, *some.shape[2:])
        for number, rows in self._rows:
            taken[_at(rows)] = self.kept.batches[number][_HEAD].flatten(0, 1)[
                _at(self._place[rows])
            ]
        return taken.view(self._inputs, -1, some.shape[-1])

    @contextlib.contextmanager
    def replacing(self, policy: Any) -> Iterator[None]:
        """Let layers return their kept outputs in forward passes within the context."""
        # All of them if the parameters are those of sampling; else only the input of the lowest
        # trained layer, which no trained parameter influences.
        kept, parts = self.kept, self.kept.parts
        replaced: dict[nn.Module, Callable[..., Any]] = {}
        if parts.skipped and all(_INPUT in batch for batch in kept.batches):
            # Frozen layers below the lowest trained one: its input has been kept.
            replaced = dict.fromkeys(parts.skipped, unchanged)
            replaced[parts.lowest] = partial(self._from_input, parts.lowest.forward)
        if kept.fits(policy):
            for name, module in parts.linear.items():
                if all(name in batch for batch in kept.batches):
                    replaced[module] = _product_of(module, partial(self.of_tokens, name))
        if kept.has_logits(policy):
            replaced[parts.head] = _product_of(parts.head, self.of_logits)
        with forwards_replaced(replaced):
            yield

    def _from_input(
        self, forward: Callable[..., Any], hidden_states: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return forward(self.of_tokens(_INPUT), *args, **kwargs)


def unchanged(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the input, in place of what a layer makes of it."""
    return hidden_states


@contextlib.contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules compute something else within the context, inside their own hooks."""
    own: dict[nn.Module, Any] = {}  # accelerate puts a forward of its own into a module
    try:
        for module, forward in forwards.items():
            own[module] = vars(module).get("forward")
            module.forward = forward
        yield
    finally:
        for module, forward in own.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _at(places: NDArray[np.int64]) -> Any:
    """Return an index of these places: a slice where they follow one another."""
    if len(places) and np.array_equal(places, np.arange(places[0], places[0] + len(places))):
        return slice(int(places[0]), int(places[0]) + len(places))
    return torch.from_numpy(places)


def _product_of(
    module: nn.Module, output: Callable[[], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T

    def forward(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(x, weight, output())  # type: ignore[no-untyped-call]
        return product

    return forward


class _Product(torch.autograd.Function):
    """A product with a frozen weight ``[outputs, inputs]``, whose result is known."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return output.detach()  # not a view, to which some adapters could not add

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight, None, None
