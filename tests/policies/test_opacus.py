"""Models that Opacus has wrapped."""

import pytest
import torch
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

from dprlhf.policies.loading import without_wrapper
from helpers import tiny


@pytest.mark.parametrize("kind", [DataParallel, DistributedDataParallel])
def test_a_model_for_several_devices_is_the_one_inside(kind: type[torch.nn.Module]) -> None:
    model = tiny.model("llama")
    wrapped = kind.__new__(kind)  # one of them asks for a process group
    torch.nn.Module.__init__(wrapped)
    wrapped.module = model
    assert without_wrapper(wrapped) is model


@pytest.mark.filterwarnings("ignore")  # of Opacus, about hooks
def test_a_wrapped_model_is_the_one_inside(capsys: pytest.CaptureFixture[str]) -> None:
    from opacus import GradSampleModule

    model = tiny.model("llama").train()  # Opacus keeps what a layer saw in training alone
    tokens = torch.arange(1, 9)[None]
    before = model(tokens).logits.detach()
    wrapped = GradSampleModule(model, strict=False)
    wrapped(tokens).logits.sum().backward()
    assert any(getattr(p, "grad_sample", None) is not None for p in model.parameters())
    found = without_wrapper(wrapped)
    assert found is model
    assert "dprlhf privacy declare" in capsys.readouterr().err
    assert not any(hasattr(p, "grad_sample") for p in found.parameters())
    after = found(tokens).logits
    after.sum().backward()  # no hook is left that would keep the rows' gradients
    assert not any(hasattr(p, "grad_sample") for p in found.parameters())
    torch.testing.assert_close(after.detach(), before)
