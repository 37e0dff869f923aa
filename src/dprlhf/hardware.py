"""What this machine has: cores it may use, and the number format it computes in."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dprlhf.errors import DprlhfError

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
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return pinned.copy_(tensor)


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Let torch choose kernels that give the same bits each time; for gradients.

    On a GPU the backward pass of fused attention adds up in an order of chance wherever a row is
    longer than a block, and so do sums by index.
    """
    import torch

    # torch asks for it; on one stream its own workspaces give repeatable products in any case.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its types lack what it has
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # nothing here reads what is empty
    try:
        yield
    except RuntimeError as error:
        operation, missing, _ = str(error).partition(" does not have a deterministic")
        if not missing:
            raise
        raise DprlhfError(
            f"gradients: {operation} gives other bits each time on this device, so one user's"
            " influence cannot be bounded; try another model or device"
        ) from None
    finally:
        memory.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before, warn_only=warn)


@contextlib.contextmanager
def default_torch_state() -> Iterator[Callable[[], None]]:
    """Compute with gradients, in the tensors' own format, whatever a program or user code sets.

    Inside, ``torch.no_grad``, ``inference_mode``, ``autocast``, anomaly mode (an error where one
    user's gradient is not a number), the default dtype and the default device have no effect.
    Threads, precision and choice of algorithms stay as they are on entry. Afterwards everything is
    as it was before.

    Yields:
        A function that sets everything to what it was at the start of the block.
    """
    import torch

    settings = _torch_settings()
    before = [_read(read) for read, _, _ in settings]
    defaults = [
        now if default is None else default
        for now, (_, _, default) in zip(before, settings, strict=True)
    ]

    def put(values: list[Any]) -> None:
        for (read, write, _), value in zip(settings, values, strict=True):
            if value is not None and _read(read) != value:
                write(*value)

    # Not among the settings: torch changes it by entering and leaving a context alone.
    with torch.inference_mode(False):
        put(defaults)
        try:
            yield functools.partial(put, defaults)
        finally:
            put(before)


_Setting = tuple[Callable[[], Any], Callable[..., object], Any]


def _torch_settings() -> list[_Setting]:
    """Return how each of torch's settings is read, how it is written, and its value in a run.

    Values are the arguments of what writes them; None leaves a setting as it is.
    """
    import torch

    b: Any = torch.backends  # its types lack half of what it has
    held: Any = torch._GLOBAL_DEVICE_CONTEXT
    settings: list[_Setting] = [
        (lambda: (torch.is_grad_enabled(),), torch.set_grad_enabled, (True,)),
        (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            torch.autograd.set_detect_anomaly,
            (False, True),
        ),
        (lambda: (torch.get_default_dtype(),), torch.set_default_dtype, (torch.float32,)),
        (
            # Without one, there is no context.
            lambda: (getattr(getattr(held, "device_context", None), "device", None),),
            torch.set_default_device,
            (None,),
        ),
        (lambda: (torch.get_num_threads(),), torch.set_num_threads, None),
        # Whether the smallest numbers count as zero, torch sets and does not tell.
        (lambda: (sys.float_info.min * float("0.5") == 0,), torch.set_flush_denormal, None),
        (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda mode, warn: torch.use_deterministic_algorithms(mode, warn_only=warn),
            None,
        ),
        # The one for all backends comes before those of each, which it changes.
        (
            lambda: (torch.get_float32_matmul_precision(),),
            torch.set_float32_matmul_precision,
            None,
        ),
    ]
    read: Callable[[], Any]
    for device in ("cpu", "cuda"):
        read = functools.partial(lambda device: (device, torch.is_autocast_enabled(device)), device)
        settings.append((read, torch.set_autocast_enabled, (device, False)))
    backends = [b, b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn]
    backends += [b.mkldnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn]
    attributes = [(backend, "fp32_precision") for backend in backends]
    attributes += [(b.cudnn, name) for name in ("enabled", "benchmark", "deterministic")]
    attributes += [(b.mkldnn, "enabled")]
    attributes += [
        (b.cuda.matmul, f"allow_{name}_reduced_precision_reduction") for name in ("fp16", "bf16")
    ]
    for owner, name in attributes:
        read = functools.partial(lambda owner, name: (getattr(owner, name),), owner, name)
        settings.append((read, functools.partial(setattr, owner, name), None))
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        enabled = getattr(b.cuda, f"{name}_sdp_enabled")
        read = functools.partial(lambda enabled: (enabled(),), enabled)
        settings.append((read, getattr(b.cuda, f"enable_{name}_sdp"), None))
    return settings


def _read(read: Callable[[], Any]) -> Any:
    """Return a setting; None where torch cannot tell, as after a mix of old and new names."""
    try:
        return read()
    except RuntimeError:
        return None


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
