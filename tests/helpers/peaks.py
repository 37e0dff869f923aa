"""Peak memory of some arrays, for ``test_bench.py``: a program that imports little else."""

from __future__ import annotations

import numpy as np
import torch


def least_peak() -> float:
    """Return the peak of some arrays in MiB, least of five."""
    from bench.measure import peak_bytes  # in scripts/, which only the program's path has

    mebibyte = 2**20

    def call() -> None:
        first = torch.zeros(10 * mebibyte, dtype=torch.uint8) + 1
        second = np.ones(20 * mebibyte, dtype=np.uint8)
        del first
        third = torch.ones(5 * mebibyte, dtype=torch.uint8)
        del second, third

    call()  # what is made once, such as threads, is no part of it
    return min(peak_bytes(call, resident=mebibyte) for _ in range(5)) / mebibyte


if __name__ == "__main__":
    print(least_peak())
