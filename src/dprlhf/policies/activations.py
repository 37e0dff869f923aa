"""An adapter's start: its directions are those of the layers' inputs on public text."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dprlhf.policies.causal_lm import CausalLMPolicy


@torch.no_grad()
def align_with_activations(
    policy: CausalLMPolicy, tokens: torch.Tensor, mask: torch.Tensor, batch_size: int
) -> None:
    """Set each ``lora_A`` to the principal directions of its layer's inputs on PUBLIC text.

    The rows of A become the leading right singular vectors of the inputs, not centred, with the
    norms of the random initial rows (compare EVA, arXiv 2410.07170). Few tokens have a component
    along a random direction, nearly all along the leading one, so the gradients of different users
    agree more and stand out more from the noise.

    Args:
        policy: A policy whose adapter has ``lora_A``; it is changed in place.
        tokens: Public text, ``[rows, tokens]``.
        mask: 1 for real tokens and 0 for padding, same shape.
        batch_size: Rows in one forward pass.
    """
    second_moments: dict[str, torch.Tensor] = {}
    real = torch.empty(0)

    def capture(name: str) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            if inputs[0].dim() == 2:
                return  # DoRA multiplies A by the identity to take the merged weight's norm
            x = inputs[0][real].double()
            second_moments[name] = second_moments.get(name, 0) + x.T @ x

        return hook

    layers = {n: m for n, m in policy.model.named_modules() if ".lora_A." in n}
    hooks = [layer.register_forward_hook(capture(name)) for name, layer in layers.items()]
    # response_logprobs puts a column in front and leaves the last one out.
    tokens, mask = F.pad(tokens, (0, 1)), F.pad(mask, (0, 1))
    for start in range(0, len(tokens), batch_size):
        rows = slice(start, start + batch_size)
        real = mask[rows].roll(1, dims=1).bool().to(policy.device)
        policy.response_logprobs(tokens[rows].to(policy.device), mask[rows].to(policy.device), 1)
    for hook in hooks:
        hook.remove()
    for name, layer in layers.items():
        _, directions = torch.linalg.eigh(second_moments[name])
        leading = directions.flip(1)[:, : layer.weight.shape[0]].T
        signs = leading.sum(1, keepdim=True).sign()  # eigenvectors have no sign of their own
        lengths = layer.weight.double().norm(dim=1, keepdim=True)
        layer.weight.copy_(leading * signs * lengths)
