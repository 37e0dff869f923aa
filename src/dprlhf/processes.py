"""Several processes as one: thin functions over accelerate.

Users are shared out by this project's own rule, and sums are sums: accelerate's samplers may repeat
a sample, and its gradient reduction averages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Processes:
    """This process among all of the launch."""

    accelerator: Any

    @classmethod
    def connect(cls) -> Processes:
        """Join the launch; a plain start is a launch of one."""
        from accelerate import Accelerator

        return cls(Accelerator(cpu=not torch.cuda.is_available()))

    @property
    def main(self) -> bool:
        """Whether this process writes the files and the ledger."""
        return bool(self.accelerator.is_main_process)

    @property
    def count(self) -> int:
        """The number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self.accelerator.device
        return device

    def share(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this process's users: every user is on exactly one process."""
        return users[self.accelerator.process_index :: self.count]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes (never an average), in the dtype of ``values``."""
        if self.count == 1:
            return values
        total: torch.Tensor = self.accelerator.reduce(values.to(self.device), reduction="sum")
        return total.to(values.device)

    def from_main(self, value: Any) -> Any:
        """Return the main process's value on every process."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        box = [value]
        broadcast_object_list(box, from_process=0)
        return box[0]

    def wait(self) -> None:
        """Wait for all processes."""
        self.accelerator.wait_for_everyone()
