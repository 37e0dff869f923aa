"""Whole runs in several processes, for ``test_processes.py``: ``python launched.py FOLDER``.

The libraries are imported once; the processes of a launch are forks of this one, connected through
the same environment variables that torchrun sets. Each leaves what it saw in ``FOLDER``.
"""

import dataclasses
import hashlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import accelerate.utils  # noqa: F401
import datasets  # noqa: F401
import peft  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, too

import torch
from torch.distributed.fsdp import fully_shard  # noqa: F401
from transformers import GPT2LMHeadModel  # noqa: F401

import dprlhf
import dprlhf.training.reinforcement
from dprlhf import DprlhfError
from dprlhf.boundary import Released
from dprlhf.budget import Book
from dprlhf.privacy import gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.recipe import RewardRecipe
from dprlhf.training import reinforcement
from dprlhf.training.processes import Processes
from helpers import tiny
from helpers.fixed import fix_randomness, prepare_to_fork
from helpers.rounds import value_of
from helpers.runs import ADAPTER

PROMPTS = [f"user {i} says {'more ' * (i % 4)}" for i in range(9)]
ROUNDS = 3
EVALUATED = 8


def reward(prompts: list[str], completions: list[str]) -> list[float]:
    return [len(text.encode()) / 8 for text in completions]


def settings(model: str) -> dict[str, Any]:
    return {
        "model": model, "prompts": PROMPTS, "reward": reward, "epsilon": 8.0, "delta": 1e-2,
        "rounds": ROUNDS, "learning_rate": 0.5, "optimizer__name": "sgd",
        "policy__adapter": ADAPTER, "data__max_prompt_tokens": 32, "rollout__max_new_tokens": 5,
        "rollout__batch_size": 4, "update__batch_size": 4, "update__clip_norm": 0.01,
        "evaluation_prompts": [f"public {'words ' * (i % 3)}{i}" for i in range(EVALUATED)],
        "quiet": True,
    }  # fmt: skip


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


@dataclasses.dataclass
class Seen:
    """What one process saw of a run."""

    processes: int = 0
    ledgers: int = 0
    shares: list[int] = dataclasses.field(default_factory=list)
    sums: list[torch.Tensor] = dataclasses.field(default_factory=list)
    noise: list[str] = dataclasses.field(default_factory=list)
    released: list[str] = dataclasses.field(default_factory=list)
    parameters: list[torch.Tensor] = dataclasses.field(default_factory=list)
    weights_held: int = 0
    told: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def spy(owner: Any, name: str, note: Callable[[Any], object]) -> None:
    """Let ``note`` see what ``owner.name`` returns."""
    real = getattr(owner, name)

    def spied(*args: Any, **kwargs: Any) -> Any:
        value = real(*args, **kwargs)
        note(value)
        return value

    setattr(owner, name, spied)


def watch() -> Seen:
    """Fix the key, compute in float64, and note what passes."""
    seen = Seen()
    fix_randomness()
    spy(dprlhf.training.reinforcement, "load_policy_of", lambda policy: policy.model.double())
    spy(Ledger, "__init__", lambda _: setattr(seen, "ledgers", seen.ledgers + 1))
    spy(Processes, "share", lambda users: seen.shares.append(len(users)))
    # Sums of two numbers are votes on the layout, of three the divergence of a step.
    spy(Processes, "sum", lambda sum_: seen.sums.append(sum_.clone()) if len(sum_) > 3 else None)
    spy(gate, "rounded_gaussian", lambda noise: seen.noise.append(digest(noise)))
    spy(
        Processes,
        "on_main",
        lambda value: isinstance(value, Released) and seen.released.append(digest(value_of(value))),
    )
    return seen


SUBSPACE = {
    "update__subspace": {"rank": 3, "prompts": 9, "keep_perplexity": True, "target_kl": 0.1},
    "evaluation_prompts": [f"public {'words ' * (i % 3)}{i}" for i in range(EVALUATED + 12)],
    "evaluation__prompts": EVALUATED,
    "evaluation__every": 2,
}


def train(folder: Path, run: str, changes: Any = MappingProxyType({})) -> None:
    """Train, and leave what this process saw in ``<run>-seen-<rank>.pt``."""
    seen = watch()
    values = settings(str(folder / "model")) | changes
    result = dprlhf.train(**values, output_dir=folder / run, callbacks=[seen.told.append])
    seen.processes = Processes.connect().count
    seen.parameters = [p.detach().clone() for p in result.policy.parameters.values()]
    seen.weights_held = sum(
        getattr(p, "_local_tensor", p).numel() for p in result.policy.model.parameters()
    )
    torch.save(vars(seen), folder / f"{run}-seen-{os.environ['RANK']}.pt")


def train_in_another_order(folder: Path, run: str) -> None:
    """Train as a program does that shuffles its list anew in each process."""
    order = 1 if os.environ["RANK"] == "0" else -1
    train(folder, run, changes={"prompts": PROMPTS[::order]})


def judge(folder: Path, run: str, rounds: int = ROUNDS) -> None:
    """Fit a reward model to pairs, in float32."""
    stage = RewardRecipe.model_validate(
        {
            "policy": {"model_name_or_path": str(folder / "model"), "adapter": ADAPTER},
            "data": {"path": "in-memory", "max_tokens": 24},
            "optimizer": {"name": "sgd", "learning_rate": 0.5},
            "update": {"clip_norm": 0.01, "batch_size": 4},
            "privacy": {"epsilon": 8.0, "delta": 1e-2},
            "rounds": rounds,
        }
    )
    pairs = [{"prompt": text, "chosen": text[-3:], "rejected": text[:2]} for text in PROMPTS]
    fix_randomness()
    dprlhf.train_stage(stage, data=pairs, output_dir=folder / run, quiet=True)


def die_in_round_2(owner: Any, name: str) -> None:
    """Kill this process when it gets to ``owner.name`` for the second time."""
    real, calls = getattr(owner, name), []

    def killing(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, killing)


def train_until_killed(folder: Path, run: str, rank: str, owner: Any, name: str) -> None:
    if os.environ["RANK"] == rank:
        die_in_round_2(owner, name)
    train(folder, run)


def resume(folder: Path, run: str) -> None:
    watch()
    public = settings("")["evaluation_prompts"]
    dprlhf.resume(
        folder / run, prompts=PROMPTS, reward=reward, evaluation_prompts=public, quiet=True
    )


def launch(processes: int, folder: Path, name: str, action: Callable[[], None]) -> None:
    """Fork the processes of one launch and wait for all; write their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            signal.alarm(300)  # a process that waits for ever must not outlive the tests
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            output = os.open(folder / f"{name}-output-{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os._exit(status(action))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / f"{name}-codes").write_text(" ".join(map(str, codes)))


def status(action: Callable[[], None]) -> int:
    try:
        action()
    except DprlhfError as error:
        print(f"dprlhf: {error}", flush=True)
        return 2
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(folder: Path) -> None:
    prepare_to_fork()
    tiny.save(folder / "model")
    for count in (1, 3):
        launch(count, folder, f"run-{count}", lambda n=count: train(folder, f"run-{n}"))
    for count in (1, 2):
        name = f"guided-{count}"
        launch(count, folder, name, lambda n=name: train(folder, n, changes=SUBSPACE))
    for count in (1, 2):
        launch(count, folder, f"reward-{count}", lambda n=count: judge(folder, f"reward-{n}"))
    os.environ["DPRLHF_BOOK"] = str(folder / "book.db")
    Book.create(os.environ["DPRLHF_BOOK"], "all", epsilon=9.0, delta=1e-2, unit=None)
    for name in ("counted-2", "refused-2"):
        launch(2, folder, name, lambda n=name: judge(folder, n, rounds=1))
    del os.environ["DPRLHF_BOOK"]
    launch(2, folder, "shuffled-2", lambda: train_in_another_order(folder, "shuffled-2"))
    # What `accelerate launch` sets for FSDP; the second is its default.
    sharded = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    os.environ.update(dict.fromkeys(sharded, "true"))
    launch(2, folder, "sharded-2", lambda: train(folder, "sharded-2"))
    launch(2, folder, "reward-sharded-2", lambda: judge(folder, "reward-sharded-2"))
    for name in sharded:
        del os.environ[name]
    for name, processes, rank, owner, function in (
        ("worker-killed", 2, "1", reinforcement, "score_private"),  # before the sum of round 2
        ("main-killed", 2, "0", gate, "rounded_gaussian"),  # charged, and its noise not yet drawn
    ):
        launch(
            processes, folder, name,
            lambda n=name, r=rank, o=owner, f=function: train_until_killed(folder, n, r, o, f),
        )  # fmt: skip
        launch(1, folder, f"{name}-resumed", lambda n=name: resume(folder, n))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
