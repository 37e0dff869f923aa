"""Checkpoints: policy, optimizer and what else a run keeps, and the number of the round.

All of it is computed from released values only.

Nothing here is secret: no key, no random state, no batch.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.runs.folder import RunFolder, replaced_folder
from dprlhf.runs.lineage import Carried, metadata

_SAMPLED = 64


class Stateful(Protocol):
    """A part of a run that a checkpoint keeps beside policy and optimizer, such as a subspace."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors to keep, all of them released or public."""

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned."""


def save_checkpoint(
    folder: RunFolder,
    t: int,
    policy: CausalLMPolicy,
    optimizer: torch.optim.Optimizer,
    others: Mapping[str, Stateful] | None = None,
    carried: Carried | None = None,
) -> None:
    """Replace the run's checkpoint by the state after round t, atomically."""
    moments = moments_of(optimizer, list(policy.parameters))
    with replaced_folder(folder.checkpoint) as fresh:
        header = metadata(carried) if carried is not None else None
        save_file(policy.state(), fresh / "policy.safetensors", metadata=header)
        save_file(moments, fresh / "optimizer.safetensors")
        for name, part in (others or {}).items():
            save_file(part.state(), fresh / f"{name}.safetensors", metadata=header)
        state = {"round": t, "frozen": frozen_sums(policy.model)}
        (fresh / "state.json").write_text(json.dumps(state), encoding="utf-8")


def last_checkpoint(folder: RunFolder) -> Path | None:
    """Return the folder of the run's last checkpoint; None before the first."""
    newest = folder.checkpoint
    # A crash between the renames of a replacement leaves only the previous checkpoint.
    previous = newest.with_name(newest.name + ".old")
    return next((path for path in (newest, previous) if path.exists()), None)


def load_checkpoint(
    folder: RunFolder,
    policy: CausalLMPolicy,
    optimizer: torch.optim.Optimizer,
    others: Mapping[str, Stateful] | None = None,
) -> int:
    """Load the last checkpoint into the parts of a run; return its round, 0 without one."""
    source = last_checkpoint(folder)
    if source is None:
        return 0
    with _undamaged(source):
        state = json.loads((source / "state.json").read_text("utf-8"))
        t = int(state["round"])
        policy.load_state(load_file(source / "policy.safetensors"))
        moments = load_file(source / "optimizer.safetensors")
        for name, part in (others or {}).items():
            part.load_state(load_file(source / f"{name}.safetensors"))
    check_frozen(policy.model, state, tolerance=1e-9)  # the very same: a sum's order may differ
    load_moments(optimizer, list(policy.parameters), moments)
    return t


def load_tuned(checkpoint: Path, policy: CausalLMPolicy) -> None:
    """Load the policy that the run would leave now."""
    with _undamaged(checkpoint):
        policy.load_state(load_file(checkpoint / "policy.safetensors"))
        state = json.loads((checkpoint / "state.json").read_text("utf-8"))
    check_frozen(policy.model, state, tolerance=1e-2)  # it may be loaded in another number format


@contextlib.contextmanager
def _undamaged(checkpoint: Path) -> Iterator[None]:
    """Say in one line that a checkpoint cannot be read."""
    try:
        yield
    except Exception as error:
        raise DprlhfError(
            f"{checkpoint}: damaged ({type(error).__name__}); it cannot be used"
        ) from None


def frozen_sums(model: torch.nn.Module) -> dict[str, float]:
    """Return the sum of up to 64 evenly spaced entries of each frozen weight.

    They tell one base model from another, which a checkpoint of an adapter does not hold. A weight
    that is sharded over processes is left out: one process alone cannot read it.
    """
    from torch.distributed.tensor import DTensor

    frozen = {
        name: weight.detach()
        for name, weight in model.named_parameters()
        if not weight.requires_grad
        and weight.is_floating_point()
        and not isinstance(weight, DTensor)
    }
    if not frozen:
        return {}
    sums = [w.flatten()[:: max(1, w.numel() // _SAMPLED)].double().sum() for w in frozen.values()]
    return dict(zip(frozen, torch.stack(sums).tolist(), strict=True))


def check_frozen(model: torch.nn.Module, state: Mapping[str, Any], *, tolerance: float) -> None:
    """Check that a model's frozen weights are those of the run that wrote a checkpoint."""
    sums, held = frozen_sums(model), state["frozen"]
    both = sums.keys() & held.keys()  # sharded weights are in neither
    if (sums and held and not both) or not all(
        math.isclose(sums[name], held[name], rel_tol=tolerance, abs_tol=tolerance) for name in both
    ):
        raise DprlhfError(
            "the base model is not the one that this run has tuned: its frozen weights are others."
            " Pass the same model, or the same seed where its weights are drawn at random"
        )


def moments_of(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the optimizer's state as named tensors; ``names`` are its parameters' names."""
    state = optimizer.state_dict()["state"]
    return {
        f"{names[index]}/{entry}": torch.as_tensor(value)
        for index, entries in state.items()
        for entry, value in entries.items()
    }


def load_moments(
    optimizer: torch.optim.Optimizer, names: Sequence[str], moments: Mapping[str, torch.Tensor]
) -> None:
    """Restore the optimizer's state from what :func:`moments_of` returned."""
    state: dict[int, dict[str, Any]] = {}
    for full, value in moments.items():
        name, entry = full.rsplit("/", 1)
        state.setdefault(names.index(name), {})[entry] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
