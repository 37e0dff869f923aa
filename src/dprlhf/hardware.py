"""What this machine has: cores it may use, and the number format it computes in."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(device: torch.device) -> int:
    """Return the whole memory of a device in bytes, used or not: of the GPU, or of the machine."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**33


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; a copy to a GPU does not make Python wait for it.

    It goes through page-locked memory with ``non_blocking=True``. A copy from ordinary memory waits
    until the GPU has done all that it was asked for before. PyTorch keeps the page-locked memory
    until the copy is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def from_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the machine's own memory; what comes from a GPU is page-locked there.

    A copy to ordinary memory goes through a small page-locked buffer, in turns: for the gradient of
    a whole model that takes longer than the gradient itself.
    """
    import torch

    if tensor.device.type != "cuda":
        return tensor.cpu()
    found = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return found.copy_(tensor)


@contextlib.contextmanager
def as_usual(device_type: str) -> Iterator[None]:
    """Compute with gradients, and in the tensors' own number format, whatever a caller has set.

    That is ``torch.no_grad``, ``torch.inference_mode`` or ``torch.autocast`` around a run.
    """
    import torch

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device_type, enabled=False),
    ):
        yield


@contextlib.contextmanager
def forked_rng() -> Iterator[None]:
    """Leave torch's random numbers, of the CPU and of the GPU in use, as they were before.

    ``torch.random.fork_rng`` by itself would start up all GPUs, and warn that it does.
    """
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield


def native_dtype(device_type: str | None = None) -> torch.dtype:
    """Return bfloat16 where a device computes in it faster, else float32.

    A processor that has to emulate bfloat16 takes several times as long as for float32. One that
    has AVX-512's instructions for it, but no AMX, may take twice as long: there, it is measured.

    Args:
        device_type: ``cuda`` or ``cpu``; None means the GPU if there is one, else the CPU.
    """
    import torch

    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        abilities: Mapping[str, Any] = torch.cpu.get_capabilities()
        native = any(abilities.get(name, False) for name in ("avx512_bf16", "bf16"))
        faster = abilities.get("amx_bf16", False) or (native and _multiplies_faster_in_bfloat16())
    return torch.bfloat16 if faster else torch.float32


@functools.cache
def _multiplies_faster_in_bfloat16() -> bool:
    """Return whether a layer's product takes less time in bfloat16 than in float32, on the CPU.

    Takes about 50 milliseconds. Each time is the least of several, since other programs may run.
    """
    import torch

    operands = {
        dtype: (torch.randn(64, 1024).to(dtype), torch.randn(1024, 1024).to(dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    seconds = dict.fromkeys(operands, math.inf)
    for _ in range(20):
        for dtype, (rows, weight) in operands.items():
            started = time.perf_counter()
            torch.nn.functional.linear(rows, weight)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - started)
    return seconds[torch.bfloat16] < seconds[torch.float32]
