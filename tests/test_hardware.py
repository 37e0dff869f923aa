"""Batches go to a GPU through page-locked memory, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dprlhf.hardware import to_device


def test_nothing_is_copied_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("page-locked memory is for GPUs")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    x = torch.arange(4)
    assert to_device(x, torch.device("cpu")) is x
    assert to_device(x, torch.device("meta")).device.type == "meta"


def test_a_copy_to_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x, asked = torch.arange(4), []

    def pinned(values: torch.Tensor) -> torch.Tensor:
        asked.append("pinned")
        return values.clone()

    def to(values: torch.Tensor, device: torch.device, **kwargs: Any) -> torch.Tensor:
        asked.append((str(device), kwargs))
        return values

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", to)
    found = to_device(x, torch.device("cuda:0"))
    assert asked == ["pinned", ("cuda:0", {"non_blocking": True})]
    assert found.tolist() == x.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_arrives_on_a_gpu_is_what_was_sent() -> None:
    sent = [torch.randn(1000, generator=torch.Generator().manual_seed(i)) for i in range(50)]
    found = [to_device(x.clone(), torch.device("cuda")) for x in sent]
    assert all(torch.equal(a, b.cpu()) for a, b in zip(sent, found, strict=True))
