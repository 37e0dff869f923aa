"""An adapter's start: its directions are those of the layers' inputs on public text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dprlhf.policies.causal_lm import CausalLMPolicy

RIDGE = 0.02
"""Added to the variances within classes, as a share of their mean, since rows are few."""


@torch.no_grad()
def align_with_activations(
    policy: CausalLMPolicy,
    tokens: torch.Tensor,  # Public text, [rows, tokens]
    mask: torch.Tensor,
    batch_size: int,
    classes: Sequence[str] | None = None,  # [rows]
) -> None:
    """Set each ``lora_A`` to directions of its layer's inputs on PUBLIC text.

    Without classes: the leading right singular vectors of the inputs, not centred (compare EVA,
    arXiv 2410.07170). Few tokens have a component along a random direction, nearly all along the
    leading one, so users' gradients agree more and stand out from the noise. With classes: the
    linear discriminants, orthogonal to the mean of all tokens, along which a step moves the classes
    apart.
    """
    # The rows of A keep the norms of their random start; a discriminant is longer: inputs have the
    # same root mean square along it as along the leading direction, and learning rates serve both.
    names = sorted(set(classes or [""]))
    labels = torch.tensor([names.index(name) for name in classes or [""] * len(tokens)])
    layers = {n: m for n, m in policy.model.named_modules() if ".lora_A." in n}
    moments = _input_moments(policy, layers, tokens, mask, labels, batch_size)
    for name, moment in moments.items():  # a layer that is not called keeps its start
        layer, rank = layers[name], layers[name].weight.shape[0]
        if not bool(moment.squares.isfinite().all()):
            continue  # made-up rows, which are tried next, show it as well, and that is refused
        directions = moment.principal(rank) if classes is None else moment.discriminants(rank)
        signs = directions.sum(1, keepdim=True).sign()  # eigenvectors have no sign of their own
        lengths = layer.weight.double().norm(dim=1, keepdim=True)
        layer.weight.copy_(directions * signs * lengths)


@dataclass
class _Moments:
    """Moments of a layer's inputs over tokens."""

    counts: torch.Tensor
    sums: torch.Tensor
    squares: torch.Tensor

    def add(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add tokens: inputs ``[tokens, inputs]``, labels ``[tokens]``."""
        self.counts += torch.bincount(labels, minlength=len(self.counts))
        self.sums.index_add_(0, labels, inputs)
        self.squares += inputs.T @ inputs

    def principal(self, rank: int) -> torch.Tensor:
        """Return the leading directions of the second moment, unit rows ``[rank, inputs]``."""
        _, directions = torch.linalg.eigh(self.squares)
        leading: torch.Tensor = directions.flip(1)[:, :rank].T
        return leading

    def discriminants(self, rank: int) -> torch.Tensor:
        """Return the leading linear discriminants, rows ``[rank, inputs]``."""
        second, shares = self.squares / self.counts.sum(), self.counts / self.counts.sum()
        means = self.sums / self.counts[:, None]
        mean = shares @ means
        within = second - (means.T * shares) @ means
        along = mean / mean.norm()
        centred = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        centred -= torch.outer(along, along)
        apart = (means - mean) @ centred * shares.sqrt()[:, None]
        ridge = RIDGE * within.diagonal().mean()
        within = centred @ within @ centred
        within.diagonal().add_(ridge)
        root = torch.linalg.cholesky(within)
        whitened = torch.linalg.solve_triangular(root, apart.T, upper=False)
        leading = torch.linalg.svd(whitened, full_matrices=False)[0][:, :rank]
        directions: torch.Tensor = torch.linalg.solve_triangular(root.T, leading, upper=True).T
        size = torch.linalg.eigvalsh(second)[-1]
        directions *= (size / (directions @ second * directions).sum(1, keepdim=True)).sqrt()
        return directions


def _input_moments(
    policy: CausalLMPolicy,
    layers: dict[str, Any],
    tokens: torch.Tensor,
    mask: torch.Tensor,
    labels: torch.Tensor,
    batch_size: int,
) -> dict[str, _Moments]:
    moments: dict[str, _Moments] = {}
    real = of_token = torch.empty(0)
    classes = int(labels.max()) + 1

    def capture(name: str) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            if inputs[0].shape[:-1].numel() != real.numel():
                return  # not of these tokens: DoRA's identity, or a head that reads the last ones
            x = inputs[0].reshape(*real.shape, -1)[real].double()
            if name not in moments:
                sizes = (classes,), (classes, x.shape[1]), (x.shape[1], x.shape[1])
                moments[name] = _Moments(*(x.new_zeros(size) for size in sizes))
            moments[name].add(x, of_token)

        return hook

    hooks = [layer.register_forward_hook(capture(name)) for name, layer in layers.items()]
    # response_logprobs puts a column in front and leaves the last one out.
    tokens, mask = F.pad(tokens, (0, 1)), F.pad(mask, (0, 1))
    for start in range(0, len(tokens), batch_size):
        rows = slice(start, start + batch_size)
        real = mask[rows].roll(1, dims=1).bool().to(policy.device)
        of_token = labels[rows, None].to(policy.device).expand_as(real)[real]
        policy.response_logprobs(tokens[rows].to(policy.device), mask[rows].to(policy.device), 1)
    for hook in hooks:
        hook.remove()
    return moments
