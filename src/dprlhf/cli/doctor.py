"""``dprlhf doctor``: versions, devices and assets of this machine, and what a run would lack."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from dprlhf.errors import DprlhfError

_OPTIONAL = "matplotlib", "vllm", "tensorboard", "wandb", "mlflow", "trackio"
"""Packages of the extra ``vllm``, and the trackers of ``tracking.report_to``."""


@dataclass(frozen=True)
class Finding:
    """One line of the examination of this machine."""

    name: str
    value: str
    good: bool = True  # False if a run would fail because of it


def examine() -> list[Finding]:
    """Examine versions, devices, number formats, processes, disk, hub and assets.

    Nothing is downloaded or written, and no token is shown.
    """
    from dprlhf.assets import status

    free = shutil.disk_usage(Path.cwd()).free / 2**30
    pull = "for the demo: dprlhf assets pull"
    return [
        Finding("python", platform.python_version()),
        *_versions(),
        *_devices(),
        _processes(),
        Finding("disk", f"{free:.1f} GiB free in {Path.cwd()}", free > 1),
        _hub(),
        *(
            Finding(f"asset {one.name}", "ready" if one.ready else f"not there; {pull} {one.name}")
            for one in status()
        ),
    ]


def _versions() -> list[Finding]:
    own = _version("dprlhf")
    if own is None:
        return [Finding("dprlhf", "runs from its source; install it: pip install -e .", good=False)]
    findings = [Finding("dprlhf", own)]
    for line in importlib.metadata.requires("dprlhf") or []:
        asked, _, marker = line.partition(";")
        if "extra" in marker:
            continue
        name, _, least = asked.strip().partition(">=")  # all of this package's have this form
        version = _version(name)
        good = version is not None and _numbers(version) >= _numbers(least)
        wanted = "" if good else f"; needed: {asked} (pip install it)"
        findings.append(Finding(name, (version or "missing") + wanted, good))
    installed = [f"{name} {v}" for name in _OPTIONAL if (v := _version(name))]
    return [*findings, Finding("optional packages", ", ".join(installed) or "none installed")]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[Finding]:
    try:
        import torch

        from dprlhf.hardware import native_dtype, usable_cores
    except ImportError as error:
        return [Finding("devices", f"torch cannot be imported ({error})", False)]
    native = str(native_dtype("cpu")).removeprefix("torch.")
    findings = [
        Finding("cpu", f"{usable_cores()} cores, {torch.get_num_threads()} threads, {native}")
    ]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        native = str(native_dtype("cuda")).removeprefix("torch.")
        memory = f"{about.total_memory / 2**30:.0f} GiB"
        findings.append(Finding(f"gpu {index}", f"{about.name}, {memory}, {native}"))
    return findings if len(findings) > 1 else [*findings, Finding("gpu", "none: runs use the CPU")]


def _processes() -> Finding:
    try:
        from dprlhf.training.processes import Processes

        processes = Processes.connect()
    except (ImportError, DprlhfError) as error:
        return Finding("processes", str(error), False)
    return Finding("processes", f"{processes.count}, this one on {processes.device}")


def _hub() -> Finding:
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        return Finding("hub", str(error), False)
    if constants.HF_HUB_OFFLINE:
        return Finding("hub", "offline (HF_HUB_OFFLINE): models and data must be on this machine")
    signed_in = huggingface_hub.get_token() is not None
    about = "a token is set" if signed_in else "no token: enough for public models; push needs one"
    return Finding("hub", about)
