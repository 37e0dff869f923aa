"""Data-parallel processes: thin functions over accelerate.

Users are distributed by this project's own rule, and tensors are summed: accelerate's samplers may
repeat a sample, and its gradient reduction averages. Launch files are in ``recipes/accelerate``;
``docs/scaling.md`` says what each way of launching costs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy

T = TypeVar("T")

# This bounds the wait for a process that hangs; it is long, because rewards and evaluation may keep
# one process busy while the others wait. A process that dies is noticed at once: by the others, as
# its connections close (gloo), or by the launcher (nccl).
_PATIENCE = timedelta(hours=1)


def _leave() -> None:
    # The group's threads abort a process that ends while they run.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@dataclass
class Processes:
    """The processes of one launch, as seen from this process."""

    accelerator: Any
    _lock_step: _LockStep | None = None

    @classmethod
    def connect(cls) -> Processes:
        """Join the launch; without a launcher, it is a launch of one process."""
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        for name in ("DEEPSPEED", "MEGATRON_LM"):
            if _flag(f"ACCELERATE_USE_{name}"):
                raise DprlhfError(
                    f"accelerate launch: {name} is not supported, since it owns the backward pass"
                    " that per-user gradients are taken from; launch with whole copies of the model"
                    " or with FSDP (distributed_type: FSDP in the config of accelerate)"
                )
        if _flag("ACCELERATE_USE_FSDP"):
            # Accelerate's default: transformers gives weights to the first process alone, for
            # accelerate to broadcast. Here each process loads them all and keeps its shards.
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        made = cls(
            Accelerator(
                cpu=not torch.cuda.is_available(),
                kwargs_handlers=[InitProcessGroupKwargs(backend=None, timeout=_PATIENCE)],
            )
        )
        _check_count(made.count)
        if made.count > 1:
            atexit.unregister(_leave)  # once, however often a program connects
            atexit.register(_leave)
        return made

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
        """The device of this process."""
        device: torch.device = self.accelerator.device
        return device

    def share(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this process's users: every user is on exactly one process."""
        return users[self.accelerator.process_index :: self.count]

    def place(self, policy: CausalLMPolicy) -> None:
        """Move the policy to this process's device.

        Launched with FSDP, the frozen weights of the decoder layers are sharded over the processes
        of one machine (FSDP2); adapter, embeddings and head stay whole on each.
        """
        if _flag("ACCELERATE_USE_FSDP") and self.count > 1:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            base = policy.network
            names = set(getattr(base, "_no_split_modules", None) or ())
            layers = [module for module in base.modules() if type(module).__name__ in names]
            if not layers:
                raise DprlhfError(
                    f"FSDP: transformers names no layers of {type(base).__name__} to shard; launch"
                    " without"
                )
            of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", torch.distributed.get_world_size()))
            group, _ = torch.distributed.new_subgroups(  # type: ignore[no-untyped-call]
                of_machine, timeout=_PATIENCE
            )
            mesh = DeviceMesh.from_group(group, self.device.type)
            for layer in layers:
                # Set explicitly: each layer is a root here, and the default leaves a root's weights
                # whole.
                fully_shard(
                    layer,
                    mesh=mesh,
                    reshard_after_forward=True,
                    ignored_params=set(policy.parameters.values()),
                )
            self._lock_step = _LockStep(policy, self.device, group, self._together)
        policy.model.to(self.device)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes (never an average), in the dtype of ``values``.

        On CPUs the sum goes up a binary tree and down again: a process sends fewer than 2 messages
        on average and the main process ⌈log₂ P⌉, where the ring of gloo's all_reduce takes
        2 (P − 1) of each. NCCL chooses between ring and tree itself.
        """
        if self.count == 1:
            return values
        self._meet()
        with self._together():
            if torch.distributed.get_backend() == "gloo":
                return _tree_sum(values)
            total: torch.Tensor = self.accelerator.reduce(values.to(self.device), reduction="sum")
        return total.to(values.device)

    def from_main(self, value: Any) -> Any:
        """Return the main process's value on every process."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        box = [value]
        self._meet()
        with self._together():
            broadcast_object_list(box, from_process=0)
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their numbers, on every process."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        self._meet()
        with self._together():
            gathered: list[T] = gather_object([value])
        return gathered

    def on_main(self, action: Callable[[], T]) -> T:
        """Run an action on the main process; every process gets its value, or its error.

        The others wait for it, so they must learn of a failure, too, or they would wait for ever.
        """
        value, problem = None, None
        if self.main:
            try:
                value = action()
            except DprlhfError as error:
                problem = error
        value, problem = self.from_main((value, problem))
        if problem is not None:
            raise problem
        return cast("T", value)

    def wait(self) -> None:
        """Wait for all processes."""
        self._meet()
        with self._together():
            self.accelerator.wait_for_everyone()

    def _meet(self) -> None:
        if self._lock_step is not None:
            self._lock_step.until(_MEET)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(". ")[0][:200]
            raise DprlhfError(
                f"process {self.accelerator.process_index} of {self.count}: another process"
                f" stopped, or did not answer for an hour ({reason}); what is charged stays"
                " charged, once: continue with dprlhf resume"
            ) from None


def _tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all processes, added up in the order of a binary tree to process 0."""
    from torch import distributed

    rank, count = distributed.get_rank(), distributed.get_world_size()
    total, step = values.detach().cpu().contiguous().clone(), 1
    while step < count:
        if rank & step:
            distributed.send(total, rank - step)
            break
        if rank + step < count:
            other = torch.empty_like(total)
            distributed.recv(other, rank + step)
            total += other
        step *= 2
    distributed.broadcast(total, 0)  # gloo's is a tree as well
    return total.to(values.device)


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def _check_count(joined: int) -> None:
    """Check the number of processes against the one in the launcher's environment."""
    names = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
    name = next((n for n in names if os.environ.get(n, "").isdigit()), None)
    if name is not None and int(os.environ[name]) != joined:
        raise DprlhfError(
            f"{name} asks for {os.environ[name]} processes, but this launch has {joined};"
            " start with torchrun or accelerate launch, which also set RANK and LOCAL_RANK"
        )
    # accelerate's single-process launcher leaves no number behind, but sets a port for several.
    if "WORLD_SIZE" not in os.environ and {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= set(
        os.environ
    ):
        raise DprlhfError(
            "accelerate launch was asked for several processes and started one (--cpu does that);"
            " give it a --config_file (two_cpu_processes.yaml among the recipes) with"
            " distributed_type: MULTI_GPU and use_cpu: true, or unset MASTER_PORT if one is meant"
        )


# The next operation of a process, in the order in which all processes perform them.
_FORWARD, _BACKWARD, _MEET = 0, 1, 2


class _LockStep:
    """Keeps processes that hold shards of one model in step.

    A pass through sharded layers gathers their weights from all processes, so all must run the same
    passes in the same order. But the number of micro-batches and of sampled tokens depends on each
    process's users. So before each pass the processes compare their next operations and run the
    earliest of them together; a process whose own operation is a later one takes part with a pass
    over one token.

    A pass that records gradients must be followed by its backward pass.
    """

    def __init__(
        self,
        policy: CausalLMPolicy,
        device: torch.device,
        group: torch.distributed.ProcessGroup,
        together: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._backbone = policy.network.base_model
        self._parameters = list(policy.parameters.values())
        self._device, self._group, self._together = device, group, together
        self._helping = False
        self._backbone.register_forward_pre_hook(self._before)

    def _before(self, module: Any, inputs: Any) -> None:
        if not self._helping:
            self.until(_BACKWARD if torch.is_grad_enabled() else _FORWARD)

    def until(self, wanted: int) -> None:
        """Take part in other processes' earlier operations until this process's own one is next."""
        while True:
            least = torch.tensor([wanted], device=self._device)
            with self._together():
                torch.distributed.all_reduce(
                    least, op=torch.distributed.ReduceOp.MIN, group=self._group
                )
            next_ = int(least)
            if next_ == wanted:
                return
            self._helping = True
            with torch.set_grad_enabled(next_ == _BACKWARD):
                token = torch.zeros((1, 1), dtype=torch.long, device=self._device)
                hidden = self._backbone(input_ids=token, use_cache=False)[0]
            if next_ == _BACKWARD:
                torch.autograd.backward(hidden.sum(), inputs=self._parameters)
                for parameter in self._parameters:
                    parameter.grad = None
            self._helping = False
