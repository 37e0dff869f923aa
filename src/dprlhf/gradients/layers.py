"""The trainable layers of a model, and by which rule each parameter's per-user gradient follows.

The weight of a linear layer or an embedding has a sum of outer products; a vector (a bias, the gain
of a norm, IA3's scales) what its layer computes. With any other, users go one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from dprlhf.errors import DprlhfError
from dprlhf.policies.mixing import refuse_mixing

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
    """Return the modules with trainable parameters, each with those parameters."""
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
