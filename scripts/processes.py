"""Measure rounds in several processes of this machine: strong scaling, and what a rank costs.

``scaling``: the same run on one process and on two, a thread each, by the time of a round; and what
the machine itself gives: two unconnected runs of half of the users each, at the same time.

``ranks``: up to 64 processes, forks of one, with a user each and a policy of a few numbers: the
processor time that a rank spends in a round's sum and release, which should not grow with their
number. Writes rows to ``docs/results/scaling.json``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import signal
import socket
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import accelerate.utils  # noqa: F401 - here, so that the forks need not
import datasets
import peft  # noqa: F401
import torch

import dprlhf
from bench.models import byte_tokenizer, causal_lm
from dprlhf.boundary import BoundedSum
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.plan import make_plan
from dprlhf.runs.measurements import Result, at_least, at_most, write_results
from dprlhf.training.processes import Processes

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "scaling.json"
ROUNDS, USERS = 6, 64
RANKS, DIMENSION = (1, 2, 4, 16, 64), 1536
COUNTED = 20
STRONG, FLAT = 1.8, 2.0


def launch(processes: int, action: Callable[[], object], *, connected: bool = True) -> None:
    """Run an action in forks of this process, connected as by torchrun, or each alone."""
    gc.freeze()
    children = []
    ports = [_port() for _ in range(1 if connected else processes)]
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            signal.alarm(580)
            os.environ |= {
                "RANK": str(rank if connected else 0),
                "LOCAL_RANK": str(rank if connected else 0),
                "WORLD_SIZE": str(processes if connected else 1),
                "LOCAL_WORLD_SIZE": str(processes if connected else 1),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports[0 if connected else rank]),
                "NUMBER": str(rank),
            }
            code = 1
            try:
                torch.set_num_threads(1)
                action()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise SystemExit(f"processes ended with {codes}")


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --------------------------------------------------------------------------- strong scaling


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def train(folder: Path, users: int, name: str) -> None:
    """Train; leave the seconds between the rounds' ends, by both clocks, in ``NAME-<number>.json``.

    Processor time does not count what other programs of a busy machine take, nor waiting.
    """
    ends = []
    name = f"{name}-{os.environ['NUMBER']}"
    dprlhf.train(
        model=str(folder / "model"),
        prompts=[f"user {i} writes {i * i}" for i in range(users * ROUNDS)],
        reward=reward,
        epsilon=8.0,
        rounds=ROUNDS,
        learning_rate=0.01,
        privacy__partition="fixed",
        policy__adapter={"type": "lora", "rank": 4, "target_modules": ["q_proj", "v_proj"]},
        data__max_prompt_tokens=32,
        rollout__responses=8,
        rollout__max_new_tokens=16,
        rollout__batch_size=64,
        update__batch_size=8,
        callbacks=[lambda _: ends.append((time.perf_counter(), time.process_time()))],
        output_dir=folder / (name if os.environ["WORLD_SIZE"] == "1" else name[:-2]),
        quiet=True,
    )
    seconds = [[b - a for a, b in zip(*two, strict=True)] for two in itertools.pairwise(ends)]
    (folder / f"{name}.json").write_text(json.dumps(seconds))


def scaling(folder: Path, turns: int) -> list[Result]:
    causal_lm("llama", small=True).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    seconds: dict[str, list[float]] = {"one": [], "two": [], "apart": []}
    busy: dict[str, list[float]] = {"one": [], "two": [], "apart": []}
    for turn in range(turns):
        for kind, processes, users in (
            ("one", 1, USERS), ("two", 2, USERS), ("apart", 2, USERS // 2),
        ):  # fmt: skip
            name = f"{kind}-{turn}"
            launch(
                processes,
                lambda n=name, u=users: train(folder, u, n),  # type: ignore[misc]
                connected=kind != "apart",
            )
            of = [json.loads((folder / f"{name}-{p}.json").read_text()) for p in range(processes)]
            for round_ in zip(*of, strict=True):
                seconds[kind].append(max(wall for wall, _ in round_))
                busy[kind].append(max(processor for _, processor in round_))
    one, two, apart = (statistics.median(seconds[kind]) for kind in ("one", "two", "apart"))
    busiest = {kind: statistics.median(values) for kind, values in busy.items()}
    work = busiest["one"] / busiest["two"]
    name = f"a round of {USERS} users, 8 responses of 16 tokens, one thread a process"
    return [
        at_least(
            f"{name}: processor time of one process over the longer of two", work, "1", STRONG
        ),
        Result(f"{name}: one process", one, "s"),
        Result(f"{name}: two processes", two, "s"),
        at_least(f"{name}: one process over two", one / two, "1", STRONG),
        Result(f"{name}: one process over two unconnected ones with half each", one / apart, "1"),
        at_most(
            f"{name}: two processes over two unconnected ones with half each", two / apart, "1", 1.1
        ),
    ]


# --------------------------------------------------------------------------- what a rank costs


def rounds_of_a_rank(folder: Path) -> None:
    """Sum, release and hear of the release, as the trainer does; leave the processor time."""
    processes = Processes.connect()
    plan = make_plan(
        users=64 * (COUNTED + 2), rounds=COUNTED + 2, delta=1e-6, noise_multiplier=1.0,
        partition="fixed",
    )  # fmt: skip
    gate = None
    if processes.main:
        gate = Gate(
            plan, Ledger(folder / f"ledger-{processes.count}.jsonl", plan.terms()), bytes(32)
        )
    processes.wait()
    spent, start = [], 0.0
    for t in range(1, COUNTED + 3):
        own = torch.full((DIMENSION,), 1e-3, dtype=torch.float64)
        start = time.process_time()
        total = processes.sum(own)
        assert abs(float(total[0]) - 1e-3 * processes.count) < 1e-9
        processes.on_main(lambda r=t, s=total: gate.release(r, BoundedSum(s, plan.clip_norm)))  # type: ignore
        spent.append(time.process_time() - start)
    processes.wait()
    rank = os.environ["RANK"]
    kept = {"round": statistics.mean(spent[2:])}
    (folder / f"ranks-{processes.count}-{rank}.json").write_text(json.dumps(kept))


def ranks(folder: Path) -> list[Result]:
    rows, found = [], {}
    for count in RANKS:
        launch(count, lambda: rounds_of_a_rank(folder))
        times = [
            json.loads((folder / f"ranks-{count}-{rank}.json").read_text())["round"]
            for rank in range(count)
        ]
        others = times[1:] or times
        found[count] = statistics.median(others)
        name = f"sum and release of a round, {count} processes, d={DIMENSION:,}"
        rows.append(Result(f"{name}: main process", 1e3 * times[0], "ms (CPU)"))
        if count > 1:
            rows.append(Result(f"{name}: each other", 1e3 * found[count], "ms (CPU)"))
    ratio = found[RANKS[-1]] / found[4]
    title = f"sum and release of a round: a rank of {RANKS[-1]} over one of 4"
    return [*rows, Result(title, ratio, "1", f"flat: at most {FLAT:g}", ratio <= FLAT)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["scaling", "ranks"])
    parser.add_argument("--turns", type=int, default=1, help="repeats of the three runs")
    given = parser.parse_args()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        if "scaling" in given.parts:
            write_results(OUT, scaling(Path(place), given.turns), show=True)
        if "ranks" in given.parts:
            write_results(OUT, ranks(Path(place)), show=True)
