"""Per-user gradients of the trainable layers, from one forward and one backward pass.

For a linear layer with input x and output gradient g, a row's weight gradient is Σ_t g_t x_tᵀ. Both
factors are seen by hooks during an ordinary backward pass over the whole micro-batch, so no loop
over users and no second pass is needed. Rows are summed **within a user before any norm is
taken**: all responses to all prompts of a user are one contribution.

This file is the one place to replace for another engine: it turns a micro-batch's loss into
``[users, dimension]`` gradients, and :mod:`dprlhf.gradients.clipping` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import nn

from dprlhf.errors import DprlhfError


class PerUserGradients:
    """Captures per-user gradients of ``parameters`` during backward passes, as a context manager.

    The loss must be a **sum** over rows, and no layer may mix rows. A module may be called several
    times in one forward pass; the contributions add up.

    Args:
        model: the module that owns the parameters.
        parameters: the trainable ones, by their name in ``model``.

    Raises:
        DprlhfError: a trainable parameter belongs to a layer whose per-user gradient this engine
            does not know, or the model has a layer that mixes users.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._owners = _owners(model, parameters)
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._rows: torch.Tensor | None = None
        self._users = 0
        self._gradients: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Self:
        for module, names in self._owners.items():
            self._hooks.append(module.register_forward_hook(self._capture(names)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def start(self, user_of_row: torch.Tensor, users: int) -> None:
        """Begin a micro-batch: ``user_of_row`` is ``[rows]`` with values in 0..users − 1."""
        self._rows = user_of_row
        self._users = users
        self._gradients = {}

    def collect(self) -> torch.Tensor:
        """Return the gradients since :meth:`start`, ``[users, dimension]``, float32 or wider.

        The order of the columns is the order of ``parameters``, each flattened.
        """
        columns = []
        for name, shape in self._shapes.items():
            gradient = self._gradients.get(name)
            if gradient is None:
                raise DprlhfError(f"'{name}' received no gradient: it is not used by the model")
            columns.append(gradient.reshape(self._users, shape.numel()))
        self._gradients = {}
        return torch.cat(columns, dim=1)

    def _capture(self, names: dict[str, str]):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not output.requires_grad:
                return
            x = inputs[0].detach()
            output.register_hook(lambda g: self._add(names, x, g))  # type: ignore[no-untyped-call]

        return hook

    def _add(self, names: dict[str, str], x: torch.Tensor, g: torch.Tensor) -> None:
        assert self._rows is not None
        wide = torch.promote_types(g.dtype, torch.float32)
        x, g = x.to(wide), g.to(wide)
        if "weight" in names:
            self._accumulate(names["weight"], torch.einsum("rto,rti->roi", g, x))
        if "bias" in names:
            self._accumulate(names["bias"], g.sum(1))

    def _accumulate(self, name: str, of_rows: torch.Tensor) -> None:
        assert self._rows is not None
        total = self._gradients.get(name)
        if total is None:
            total = of_rows.new_zeros(self._users, *of_rows.shape[1:])
            self._gradients[name] = total
        total.index_add_(0, self._rows, of_rows)


# Batch statistics couple the users of a batch: no clipping can bound one user's influence then.
_MIXING = (nn.modules.batchnorm._BatchNorm,)


def _owners(
    model: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> dict[nn.Module, dict[str, str]]:
    """Return, for each module with trainable parameters, its local names and their full names."""
    for path, module in model.named_modules():
        if isinstance(module, _MIXING):
            raise DprlhfError(
                f"'{path}' ({type(module).__name__}) mixes the users of a batch, so one user's"
                " influence cannot be bounded"
            )
    owners: dict[nn.Module, dict[str, str]] = {}
    for name in parameters:
        path, _, local = name.rpartition(".")
        module = model.get_submodule(path)
        if not isinstance(module, nn.Linear) or local not in ("weight", "bias"):
            raise DprlhfError(
                f"'{name}' ({type(module).__name__}) has no per-user gradient here; train a LoRA"
                " on linear layers (policy.adapter.type: lora or lora-b)"
            )
        owners.setdefault(module, {})[local] = name
    return owners
