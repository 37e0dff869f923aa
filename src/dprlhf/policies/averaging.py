"""The average of a policy's parameters over rounds: post-processing of released values.

Training goes on with the last parameters θ_t. The average has less of the noise of single rounds
(Polyak & Juditsky 1992, SIAM J. Control Optim. 30(4); with private gradients De et al. 2022, arXiv
2204.13650, section 3.4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from dprlhf import recipe

_COUNT = "rounds"


class ParameterAverage:
    """A running average of trained parameters, as in ``torch.optim.swa_utils.AveragedModel``.

    It holds the trained parameters alone, where ``AveragedModel`` copies the whole model.

    Args:
        spec: The recipe's ``optimizer.average``.
        parameters: The trained parameters by name.
        rounds: The number T of rounds of the run.
    """

    def __init__(
        self, spec: recipe.Average, parameters: Mapping[str, torch.Tensor], rounds: int
    ) -> None:
        self._spec = spec
        self._parameters = parameters
        share = 1.0 if spec.tail is None else spec.tail
        self._first = rounds - max(1, round(share * rounds)) + 1
        self._count = 0
        self._mean = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, t: int) -> None:
        """Take in the parameters after round t; before the averaged rounds, do nothing."""
        if t < self._first:
            return
        self._count += 1
        decay = self._spec.decay
        # An exponential average divided by the sum of its weights, 1 − decay^n, as in Adam.
        weight = 1 / self._count if decay is None else (1 - decay) / (1 - decay**self._count)
        for name, parameter in self._parameters.items():
            self._mean[name].lerp_(parameter, weight)

    def apply(self) -> None:
        """Replace the parameters by their average; before the first averaged round, do nothing."""
        load_average(self._parameters, self.state())

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters by their average within the context."""
        last = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self.apply()
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(last[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint keeps: the averages, and the number of rounds."""
        mean = {name: value.cpu().contiguous() for name, value in self._mean.items()}
        return {**mean, _COUNT: torch.tensor(self._count)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        self._count = int(state[_COUNT])
        for name, value in self._mean.items():
            value.copy_(state[name])


@torch.no_grad()
def load_average(parameters: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Replace parameters by the average in a state of :class:`ParameterAverage`, if it has one."""
    if int(state[_COUNT]):
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
