"""Batches go to a GPU through page-locked memory; a machine's faster number format is found."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dprlhf.errors import DprlhfError
from dprlhf.hardware import default_torch_state, forked_rng, from_device, repeatable, to_device


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


def test_what_comes_from_a_gpu_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnAGpu(torch.Tensor):
        device = torch.device("cuda:0")

    def empty_like(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        asked.append(kwargs)
        return torch.zeros(x.shape)

    asked: list[dict[str, Any]] = []
    x = torch.arange(4.0)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    assert from_device(x) is x
    assert asked == []
    assert from_device(x.as_subclass(OnAGpu)).tolist() == x.tolist()
    assert asked == [{"device": "cpu", "pin_memory": True}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_arrives_on_a_gpu_is_what_was_sent() -> None:
    sent = [torch.randn(1000, generator=torch.Generator().manual_seed(i)) for i in range(50)]
    found = [to_device(x.clone(), torch.device("cuda")) for x in sent]
    assert all(torch.equal(a, b.cpu()) for a, b in zip(sent, found, strict=True))
    assert all(torch.equal(a, from_device(b)) for a, b in zip(sent, found, strict=True))


def test_random_numbers_of_the_gpu_in_use_alone_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all GPUs would start up each, and torch warns of it."""
    kept = []

    @contextlib.contextmanager
    def fork(devices: list[int]) -> Iterator[None]:
        kept.append(devices)
        yield

    with monkeypatch.context() as patched:
        patched.setattr(torch.random, "fork_rng", fork)
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "current_device", lambda: 3)
        with forked_rng():
            pass
    assert kept == [[3]]
    before = torch.get_rng_state()
    with forked_rng():
        torch.manual_seed(5)
        torch.randn(3)
    assert torch.equal(torch.get_rng_state(), before)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "anomaly": (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
    "grad": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda: torch.set_autocast_enabled("cpu", True),
    ),
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(3)),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "precision": (
        torch.get_float32_matmul_precision,
        lambda: torch.set_float32_matmul_precision("medium"),
    ),
    "new precision": (
        lambda: torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),  # type: ignore[attr-defined]
    ),
    "tf32": (
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ),
    "cudnn": (
        lambda: torch.backends.cudnn.benchmark,
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
    ),
    "attention": (
        torch.backends.cuda.flash_sdp_enabled,
        lambda: torch.backends.cuda.enable_flash_sdp(False),
    ),
    "denormal": (lambda: 5e-324 * float("1") > 0, lambda: torch.set_flush_denormal(True)),
}
OFF = {"anomaly", "grad", "autocast", "dtype", "device"}  # what a run computes without


@pytest.mark.parametrize("name", CHANGES)
def test_settings_of_torch_are_those_of_the_run_and_come_back(name: str) -> None:
    read, change = CHANGES[name]
    with default_torch_state():  # the test itself leaves nothing behind
        usual = read()
        change()
        changed = read()
        assert changed != usual
        with default_torch_state() as put_back:
            inside = read()
            assert inside == (usual if name in OFF else changed)
            put_back()
            assert read() == inside
        assert read() == changed
        put_back()
    assert read() == usual
    with default_torch_state() as put_back:
        change()
        put_back()
        assert read() == usual


def test_a_run_inside_inference_mode_takes_gradients() -> None:
    with torch.inference_mode(), default_torch_state():
        assert not torch.is_inference_mode_enabled()
        assert torch.ones(1, requires_grad=True).requires_grad


def test_gradients_are_repeatable_and_a_program_keeps_its_own_choice() -> None:
    """What a program has chosen for its own sums comes back."""
    with default_torch_state():
        torch.use_deterministic_algorithms(True, warn_only=True)
        with repeatable(), repeatable():
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    with pytest.raises(DprlhfError, match="put_ gives other bits each time"), repeatable():
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    with pytest.raises(RuntimeError, match="another"), repeatable():
        raise RuntimeError("another error")
