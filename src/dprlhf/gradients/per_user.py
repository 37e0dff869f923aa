"""Per-user gradients of the trainable layers, from one forward and one backward pass.

The gradient of a layer's weight follows from the layer's input and the gradient of its output. Both
occur during an ordinary backward pass over a whole micro-batch, so there is no loop over users and
no second pass; autograd's own weight gradients, which are sums over all users, are never computed.

A user's clip factor depends on its norm over all layers. Until that is known, the engine keeps

- for the weight of a linear layer or an embedding: the factors of each user's gradient
  (:mod:`dprlhf.gradients.ghost_norm`), or the gradient itself where it has at most twice the
  factors' elements, because its norm is cheaper. Shapes alone decide: with LoRA it is always the
  gradient, with full fine-tuning the factors unless a user has many tokens;
- for a vector (a bias, the gain of a norm, IA3's scales): each user's gradient. If it is not the
  bias of a linear layer, its layer runs again on each user's own rows and is differentiated (vmap).

Rows are summed **within a user before any norm is taken**: all responses to all prompts of a user
are one contribution.

Where a parameter has no rule, the engine takes one user alone in a pass, whose gradient is that of
autograd: right for whatever is trained, and slower.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dprlhf.errors import DprlhfError
from dprlhf.gradients.ghost_norm import (
    OuterProducts,
    add_weighted,
    at_least_float32,
    per_user,
    rounding,
    side_by_side,
    square_norm,
)
from dprlhf.hardware import repeatable
from dprlhf.policies.refusals import refuse_mixing

_CONTAINERS = (nn.ParameterDict, nn.ParameterList, nn.ModuleDict, nn.ModuleList)


class UnknownLayerError(DprlhfError):
    """A parameter has no rule by which the gradients of several users can be told apart."""


@dataclass
class Layer:
    """The trainable parameters of one module, as local names mapped to names in the model."""

    outer: dict[str, str] = field(default_factory=dict)
    output_first: bool = False  # Whether that weight is [outputs, inputs], as in nn.Linear
    vectors: dict[str, str] = field(default_factory=dict)  # All other trainable vectors

    @property
    def names(self) -> list[str]:
        """Names of all of them in the model."""
        return [*self.outer.values(), *self.vectors.values()]


def layers_of(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[nn.Module, Layer]:
    """Return the modules with trainable parameters, each with those parameters and their rule.

    The weight of a linear layer or an embedding has a sum of outer products; a vector (a bias, the
    gain of a norm, IA3's scales) what its layer computes. With any other, users go one at a time.
    """
    from transformers.pytorch_utils import Conv1D

    refuse_mixing(model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    modules = dict(model.named_modules())
    vectors: set[str] = set()
    layers: dict[nn.Module, Layer] = {}
    for path, module in modules.items():
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in names:
                continue
            name = f"{path}.{local}" if path else local
            forward = type(module).forward  # a subclass may compute something else in its own
            if local in ("weight", "bias") and (
                forward in (nn.Linear.forward, Conv1D.forward) or _plain_embedding(module)
            ):
                layer = layers.setdefault(module, Layer())
                layer.outer[local] = names[id(parameter)]
                layer.output_first = forward is nn.Linear.forward
            elif parameter.numel() == max(parameter.shape, default=1):
                owner = path
                while isinstance(modules[owner], _CONTAINERS):  # these are never called
                    owner = owner.rpartition(".")[0]
                if names[id(parameter)] in vectors:
                    raise unknown(name, module)  # it may be counted in both places
                layer = layers.setdefault(modules[owner], Layer())
                layer.vectors[name.removeprefix(f"{owner}.")] = names[id(parameter)]
                vectors.add(names[id(parameter)])
            else:
                raise unknown(name, module)
    for module, layer in layers.items():
        for name in vectors.intersection(layer.outer.values()):
            # Such as a head's bias, registered again by the module around the head: it would run
            # the head, too, and count the bias twice.
            raise unknown(name, module)
    return layers


def _plain_embedding(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.scale_grad_by_freq
    )


def unknown(name: str, module: nn.Module) -> UnknownLayerError:
    """Return the error for a parameter without a rule."""
    return UnknownLayerError(
        f"'{name}' ({type(module).__name__}) has no rule that tells the users of a batch apart"
    )


# The most elements of users' gradients that are joined: 2 MB in float64, 32 MB on an accelerator.
_TOGETHER, _TOGETHER_ON_ACCELERATOR = 2**18, 2**22

Arguments = Callable[[tuple[torch.Tensor, ...]], Any]
"""Makes a layer's arguments, ``(args, kwargs)``, from those of its inputs that have the rows."""


class PerUserGradients:
    """Norms and weighted sums of per-user gradients; per-sample gradients with a user as sample.

    The loss must be a **sum** over rows, and no layer may mix rows. A module may be called several
    times in one forward pass, and modules may share a parameter: all uses add up.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        whole: bool = False,
        alone: bool = False,
    ) -> None:
        self.alone = alone
        self._model = model
        self._parameters = dict(parameters)
        self._places = _places(self._parameters)
        self._layers = {} if alone else layers_of(model, self._parameters)
        self._whole = whole
        self._anchor = torch.zeros((), requires_grad=True)
        self._recording = False
        self._forget()

    def run(
        self,
        loss: Callable[[], torch.Tensor],
        *,
        users: int,
        rows: int,
        passes: int = 1,
        more: bool = False,
    ) -> None:
        """Run the forward and the backward pass of one micro-batch."""
        if not more:
            self._forget()
        self._users, self._rows, self._passes = users, rows, passes
        if self.alone:
            self._run_alone(loss)
            return
        self._seen.clear()
        # Whatever a program, such as a reward, has left switched off.
        with torch.enable_grad(), self._attached(), repeatable():
            scalar = loss()
            with exact_products(scalar.device):
                # The anchor is an input of every trainable layer, and nothing else requires a
                # gradient: only the path to these layers is differentiated, and no .grad is set.
                # (autograd.grad would not allow reentrant checkpointing.)
                if scalar.requires_grad:
                    scalar.backward()  # type: ignore[no-untyped-call]
        for module, layer in self._layers.items():
            if module not in self._seen:
                raise DprlhfError(
                    f"'{layer.names[0]}' received no gradient: its layer"
                    f" ({type(module).__name__}) has no part in the loss; leave it frozen"
                )

    def _run_alone(self, loss: Callable[[], torch.Tensor]) -> None:
        """Take the gradient of a single user's loss by autograd."""
        if self._users != 1:
            raise ValueError("several users in a pass of an engine that takes one")
        with torch.enable_grad(), repeatable():
            scalar = loss()
            with exact_products(scalar.device):
                gradients = gradient_of(scalar, self._parameters)
        for name, gradient in gradients.items():
            self._add(name, at_least_float32(gradient)[None])

    def norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each user's gradient norm and an upper bound to clip by, ``[users]``, float64."""
        # The bound holds for the summand as computed; it exceeds the norm by the rounding of
        # factors only.
        # Added up on the device: a copy for each layer would wait for the device each time.
        device = next(iter(self._parameters.values())).device
        square, bound = torch.zeros(2, self._users, dtype=torch.float64, device=device)
        for _, gradient in self._together():
            exact = gradient.double().square().sum(1).to(device)
            error = rounding(gradient.shape[1] + 4, torch.float64)
            square, bound = square + exact, bound + (1 + error) * exact
        for rounded, upper in self._square_norms():
            square, bound = square + rounded.to(device), bound + upper.to(device)
        return square.sqrt().cpu(), bound.sqrt().cpu()

    def _square_norms(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Yield :func:`square_norm` of each weight that is kept as factors."""
        of_weights = list(self._factors.values())
        if {uses[0].right.device.type for uses in of_weights} == {"cpu"}:
            # Around the threads: it is one switch.
            with exact_products(of_weights[0][0].right.device):
                yield from side_by_side(square_norm, of_weights)
            return
        for uses in of_weights:
            with exact_products(uses[0].right.device):
                yield square_norm(uses)

    def add_weighted_sum(self, factors: torch.Tensor, total: torch.Tensor) -> None:
        """Add Σ_u factor_u g_u to ``total``, and drop the micro-batch."""
        factors = factors.to(total.device)
        for place, gradient in self._together():
            part = total[place]
            # where, not a product: 0 · NaN is NaN and would poison the sum.
            part += factors @ torch.where(factors[:, None] > 0, gradient.to(total), 0.0)
        self._gradients.clear()
        for name, place in self._places.items():
            parameter = self._parameters[name]
            with exact_products(parameter.device):
                if name in self._factors:
                    part = total[place].view(parameter.shape)
                    add_weighted(self._factors.pop(name), factors, part)

    def _together(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of ``[dimension]`` and the users' gradients there, small ones together."""
        # To start a product takes a GPU longer than to compute it for a small parameter.
        pieces: list[torch.Tensor] = []
        start = end = 0
        on_cpu = next(iter(self._parameters.values())).device.type == "cpu"
        most = _TOGETHER if on_cpu else _TOGETHER_ON_ACCELERATOR
        for name, place in self._places.items():
            gradient = self._gradients.get(name)
            if pieces and (
                gradient is None
                or gradient.device != pieces[0].device
                or (place.stop - start) * self._users > most
            ):
                yield slice(start, end), _side_by_side(pieces)
                pieces = []
            if gradient is not None:
                start = start if pieces else place.start
                pieces.append(gradient.reshape(self._users, -1))
                end = place.stop
        if pieces:
            yield slice(start, end), _side_by_side(pieces)

    def gradients(self) -> torch.Tensor:
        """Return the gradients, ``[users, dimension]``, float32 or wider; needs ``whole``."""
        gradients = (self._gradients[name] for name in self._parameters)
        return torch.cat([gradient.reshape(self._users, -1) for gradient in gradients], dim=1)

    def recorded(self) -> list[torch.Tensor]:
        """Return all that is kept of the micro-batch, tensors with the users first."""
        factors = [factor for uses in self._factors.values() for use in uses for factor in use]
        return [*self._gradients.values(), *factors]

    @property
    def grows(self) -> bool:
        """Whether another pass over the same users adds to memory, until norms are known."""
        return bool(self._factors)

    # --- hooks: recording inputs and output gradients ----------------------------------------

    def _forget(self) -> None:
        self._users = self._rows = 0
        self._passes = 1
        self._seen: set[nn.Module] = set()
        self._gradients: dict[str, torch.Tensor] = {}
        self._factors: dict[str, list[OuterProducts]] = {}

    @contextlib.contextmanager
    def _attached(self) -> Iterator[None]:
        hooks = [m.register_forward_hook(self._tap, with_kwargs=True) for m in self._layers]
        trained = [p for p in self._model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)  # or autograd would compute their gradients
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
            for parameter in trained:
                parameter.requires_grad_(True)
            for hook in hooks:
                hook.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _tap(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> torch.Tensor | None:
        if not (self._recording and torch.is_grad_enabled()):
            return None
        layer = self._layers[module]
        if not isinstance(output, torch.Tensor):
            raise unknown(layer.names[0], module)
        arguments: Arguments | None = None
        if layer.vectors or kwargs:
            inputs, arguments = self._inputs(args, kwargs)
        else:  # as most layers are called; what follows would take longer than the layer
            inputs = [x.detach() for x in args if self._of_rows(x)]

        def record(inputs: tuple[torch.Tensor, ...], g: torch.Tensor) -> None:
            if len(g) != self._rows or not inputs:
                raise DprlhfError(
                    f"'{layer.names[0]}' ({type(module).__name__}) works on {tuple(g.shape)}, not"
                    f" on {self._rows} rows first, so users cannot be told apart"
                )
            self._seen.add(module)
            if layer.outer:
                self._record_outer(module, layer, inputs[0], g)
            if layer.vectors and arguments is not None:
                self._record_vectors(module, layer, arguments, inputs, g)

        tapped: torch.Tensor = _Tap.apply(self._anchor, output, record, *inputs)  # type: ignore[no-untyped-call]
        return tapped

    def _of_rows(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.shape[:1] == (self._rows,)

    def _inputs(self, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], Arguments]:
        """Return a layer's inputs that have the rows first, and how to call it with others."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        of_rows = [self._of_rows(x) for x in leaves]
        # Without the inputs: under gradient checkpointing nothing may hold them.
        others = [None if of_row else x for x, of_row in zip(leaves, of_rows, strict=True)]

        def arguments(inputs: tuple[torch.Tensor, ...]) -> Any:
            rest = iter(inputs)
            filled = [
                next(rest) if of_row else x for x, of_row in zip(others, of_rows, strict=True)
            ]
            return pytree.tree_unflatten(filled, structure)

        return [x.detach() for x, of_row in zip(leaves, of_rows, strict=True) if of_row], arguments

    def _by_user(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape ``[rows, ...]`` to ``[users, rows of a user, ...]``."""
        return x.view(self._users, -1, *x.shape[1:])

    def _record_outer(self, module: Any, layer: Layer, x: torch.Tensor, g: torch.Tensor) -> None:
        g = self._by_user(g).flatten(1, -2)
        x = self._by_user(x).flatten(1, -2 if x.is_floating_point() else -1)
        if getattr(module, "padding_idx", None) is not None:
            g = torch.where((x == module.padding_idx)[:, :, None], 0.0, g)
        if "weight" in layer.outer:
            name = layer.outer["weight"]
            n, m = module.weight.shape
            use = OuterProducts(g, x) if layer.output_first else OuterProducts(x, g)
            kept = self._passes * sum(f[0].numel() for f in use)
            if name not in self._factors and (
                self._whole or name in self._gradients or n * m <= 2 * kept
            ):
                self._add(name, per_user(use, n))
            else:
                self._factors.setdefault(name, []).append(use)
        if "bias" in layer.outer:
            self._add(layer.outer["bias"], at_least_float32(g).sum(1))

    def _record_vectors(
        self,
        module: nn.Module,
        layer: Layer,
        arguments: Arguments,
        inputs: tuple[torch.Tensor, ...],
        g: torch.Tensor,
    ) -> None:
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        state = {name: at_least_float32(value.detach()) for name, value in state.items()}
        vectors = {local: state.pop(local) for local in layer.vectors}

        def of_user(inputs: tuple[torch.Tensor, ...], g: torch.Tensor) -> dict[str, torch.Tensor]:
            def forward(vectors: dict[str, torch.Tensor]) -> torch.Tensor:
                args, kwargs = arguments(inputs)
                out: torch.Tensor = torch.func.functional_call(
                    module, {**state, **vectors}, args, kwargs
                )
                return out

            out, pull_back = torch.func.vjp(forward, vectors)[:2]
            gradients: dict[str, torch.Tensor] = pull_back(g.to(out.dtype))[0]
            return gradients

        self._recording = False
        try:
            gradients = torch.func.vmap(of_user)(
                tuple(at_least_float32(self._by_user(x)) for x in inputs),
                at_least_float32(self._by_user(g)),
            )
        finally:
            self._recording = True
        for local, name in layer.vectors.items():
            self._add(name, gradients[local])

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        before = self._gradients.get(name)
        self._gradients[name] = gradient if before is None else before + gradient


def gradient_of(
    loss: torch.Tensor, parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return a loss's gradient by parameter, 0 where it has none (an expert without a token)."""
    given: tuple[torch.Tensor | None, ...] = (None,) * len(parameters)
    if loss.requires_grad:
        given = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), given, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


class _Tap(torch.autograd.Function):
    """The identity on a layer's output, whose backward records inputs and output gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, output: torch.Tensor, record: Any, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.record = record
        ctx.save_for_backward(*inputs)
        return output.detach()  # not a view, which autograd would let no model write to

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        inputs = ctx.saved_tensors  # read once: checkpointing allows no more
        ctx.record(inputs, g)
        of_output = g if ctx.needs_input_grad[1] else None
        return None, of_output, None, *(None for _ in inputs)


def _places(parameters: Mapping[str, nn.Parameter]) -> dict[str, slice]:
    """Return where each parameter is in a vector of all of them, flattened in their order."""
    ends = itertools.accumulate(parameter.numel() for parameter in parameters.values())
    return {
        name: slice(end - parameter.numel(), end)
        for (name, parameter), end in zip(parameters.items(), ends, strict=True)
    }


def _side_by_side(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


@contextlib.contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Switch off autocast, TF32 and the like: the clip bound does not allow for their rounding."""
    # Since torch 2.9 a program, or transformers' tf32=True, sets this for each backend, after which
    # the getter for all of them raises. The setter leaves no backend out.
    newer = hasattr(torch.backends, "fp32_precision")
    mkldnn: Any = torch.backends.mkldnn  # its types lack matmul
    backends = [torch.backends.cuda.matmul, mkldnn.matmul] if newer else []
    before = [backend.fp32_precision for backend in backends]
    everywhere = None
    with contextlib.suppress(RuntimeError):
        everywhere = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False), repeatable():
            yield
    finally:
        if everywhere is not None:
            torch.set_float32_matmul_precision(everywhere)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
