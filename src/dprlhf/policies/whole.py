"""The policy without an adapter: every weight is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dprlhf.policies.adapters import modules_without_part
from dprlhf.policies.causal_lm import CausalLMPolicy


class WholePolicy(CausalLMPolicy):
    """The policy π_θ without an adapter: every weight that a text's logits depend on is trained.

    The base policy, a frozen copy of the weights at the start, is swapped in inside :meth:`base`.
    """

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.requires_grad_(True)
        _freeze_without_part(model)
        super().__init__(model, tokenizer, temperature)

    @property
    def network(self) -> Any:
        """The transformers model."""
        return self.model

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of all weights on the CPU."""
        return {n: p.detach().cpu().clone() for n, p in self.parameters.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load weights that :meth:`state` returned."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])

    def save(self, folder: Path) -> None:
        """Save the model; its configs and the tokenizer as they were before the first round."""
        self.set_up.put_back()
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def _freeze_without_part(model: Any) -> None:
    """Freeze the weights that no logit of a text depends on, such as those of an image tower."""
    idle = [model.get_submodule(name) for name in modules_without_part(model)]
    weights = [parameter for module in idle for parameter in module.parameters()]
    if not weights:
        return
    ids = torch.ones(1, 2, dtype=torch.long, device=weights[0].device)
    with torch.enable_grad():
        total = model(input_ids=ids).logits.sum()
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
    for parameter, gradient in zip(weights, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)
