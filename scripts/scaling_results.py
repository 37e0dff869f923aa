"""Measure how partition, grouping, ledger, accounting and noise grow, up to a million users.

Writes ``docs/results/scaling.json``. Takes about three minutes on one core and 1 GB of disk. Each
figure is taken in a process of its own, so that peaks of memory do not mix.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dprlhf.runs.measurements import Result, write_results

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "scaling.json"
ROUNDS = 10_000
LINEAR = 2.0
"""Time a user may grow so many times over a hundredfold N: a sort's log N, and caches."""


def measure(action: Callable[[], Any]) -> dict[str, float]:
    """Return seconds (the best of three), and the bytes of Python and of Arrow at their peaks."""
    import pyarrow as pa

    seconds = []
    for _ in range(3):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    arrow = pa.proxy_memory_pool(pa.default_memory_pool())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(arrow))  # it must outlive what it allocates
    pa.set_memory_pool(arrow)
    tracemalloc.start()
    kept = action()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held += arrow.bytes_allocated()
    del kept
    peaks = {"peak": peak + arrow.max_memory(), "python_peak": peak}
    return {"seconds": min(seconds), "held": held, **peaks}


def partition(users: int, kind: str) -> dict[str, float]:
    from dprlhf.privacy.partition import allocate
    from dprlhf.privacy.plan import make_plan

    plan: Any = make_plan(
        users=users, rounds=min(ROUNDS, users), delta=1e-6, epsilon=math.inf, partition=kind
    )
    return measure(lambda: allocate(plan, bytes(32)))


def write_prompts(users: int, folder: str) -> None:
    """Write one row a user with a name of 36 characters and a prompt of 400, out of order."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    rng = np.random.default_rng(0)
    for start in range(0, users, 100_000):
        numbers = rng.permutation(np.arange(start, min(start + 100_000, users)))
        table = pa.table(
            {
                "user": [f"{n:08x}-0000-4000-8000-{n:012x}" for n in numbers.tolist()],
                "prompt": [f"{n} ".ljust(400, "x") for n in numbers.tolist()],
            }
        )
        datasets.Dataset(table).to_parquet(f"{folder}/{start:09d}.parquet")
    files = sorted(Path(folder).glob("*.parquet"))
    rows = datasets.load_dataset(
        "parquet", data_files=[str(f) for f in files], split="train", cache_dir=folder + "/cache"
    )
    rows.save_to_disk(f"{folder}/rows")


def grouping(users: int, folder: str) -> dict[str, float]:
    import datasets

    from dprlhf.data.names import user_codes
    from dprlhf.data.users import Users
    from dprlhf.recipe import Data

    rows = datasets.load_from_disk(f"{folder}/rows")
    data = Data(path="rows", user_column="user")
    found = measure(lambda: Users(rows, data))
    # Arrow's memory is free again when the names are numbers, before the rest is taken.
    found["peak"] = max(measure(lambda: user_codes(rows, data))["peak"], found["python_peak"])
    made = Users(rows, data)
    start = time.process_time()
    made.digest()
    found["digest"] = time.process_time() - start
    some = np.random.default_rng(1).choice(users, 1000, replace=False)
    chosen = measure(lambda: made.select(some))
    return found | {"select": chosen["seconds"], "select_peak": chosen["peak"]}


def ledger(rounds: int) -> dict[str, float]:
    from dprlhf.privacy.ledger import Ledger

    mechanism = {"noise_multiplier": 0.8, "clip_norm": 1.0, "releases_per_round": 1}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        made = Ledger(path, {"rounds": rounds, **mechanism})
        tenth, stamps = rounds // 10, [time.process_time()]
        for t in range(1, rounds + 1):
            made.charge(t, **mechanism)
            made.commit(t)
            if t % tenth == 0:
                stamps.append(time.process_time())
        made.close()
        seconds = np.diff(stamps) / tenth
        start = time.process_time()
        Ledger(path, {"rounds": rounds, **mechanism}).close()
        return {
            "round": float(seconds.mean()),
            "growth": float(seconds[-1] / seconds[0]),
            "bytes": path.stat().st_size,
            "reopen": time.process_time() - start,
        }


def plan(users: int, rounds: int) -> dict[str, float]:
    from dprlhf.privacy.plan import make_plan

    start = time.process_time()
    make_plan(users=users, rounds=rounds, epsilon=4.0, delta=1e-7)
    return {"seconds": time.process_time() - start}


def noise(dimension: int) -> dict[str, float]:
    from dprlhf.privacy.rounded_gaussian import grid_of, rounded_gaussian

    std = grid_of(1.0, 1.0, dimension).std
    return measure(lambda: rounded_gaussian(bytes(32), "noise", 1, std=std, count=dimension))


def apart(function: Callable[..., Any], *args: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def of_sizes(name: str, found: dict[int, dict[str, float]]) -> list[Result]:
    rows = []
    for users, values in found.items():
        setting = f"{name}, N={users:,}"
        bytes_ = values["peak"] / users
        goal = ("below 200", bytes_ < 200) if users >= 100_000 else ("", None)
        rows += [
            Result(f"{setting}: time", values["seconds"], "s (CPU)"),
            Result(f"{setting}: memory at the peak", bytes_, "bytes a user", *goal),
            Result(f"{setting}: memory kept", values["held"] / users, "bytes a user"),
        ]
    small, large = sorted(found)[-2:]
    growth = found[large]["seconds"] / large / (found[small]["seconds"] / small)
    title = f"{name}: time a user at N={large:,} over N={small:,}"
    return [*rows, Result(title, growth, "1", f"linear: at most {LINEAR:g}", growth <= LINEAR)]


def main(sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000)) -> list[Result]:
    """Return the rows for so many users."""
    rows: list[Result] = []
    for kind in ("random-allocation", "poisson", "fixed"):
        found = {users: apart(partition, users, kind) for users in sizes}
        rows += of_sizes(f"partition {kind}, T=10,000", found)
    found = {}
    for users in sizes:
        with tempfile.TemporaryDirectory() as folder:
            apart(write_prompts, users, folder)
            found[users] = apart(grouping, users, folder)
    rows += of_sizes("grouping rows by a user column", found)
    for users, values in found.items():
        setting = f"N={users:,}, 400 bytes a prompt"
        peak = values["select_peak"] / 1e6
        rows += [
            Result(f"digest of the users, {setting}", values["digest"], "s (CPU)"),
            Result(f"prompts of 1,000 users from disk, {setting}", values["select"], "s (CPU)"),
            Result(
                f"prompts of 1,000 users from disk, {setting}: memory", peak, "MB", "below 20",
                peak < 20,
            ),
        ]  # fmt: skip
    for rounds in (1000, ROUNDS):
        values = apart(ledger, rounds)
        setting = f"ledger of {rounds:,} rounds"
        growth = values["growth"]
        rows += [
            Result(f"{setting}: charge and commit of a round", values["round"], "s (CPU)"),
            Result(
                f"{setting}: last tenth over first tenth", growth, "1", "linear: at most 1.5",
                growth <= 1.5,
            ),
            Result(f"{setting}: file", values["bytes"] / 1e6, "MB"),
            Result(f"{setting}: read and verify", values["reopen"], "s (CPU)"),
        ]  # fmt: skip
    values = apart(plan, sizes[-1], ROUNDS)
    name = f"plan of {sizes[-1]:,} users and 10,000 rounds: noise for epsilon 4"
    rows.append(Result(name, values["seconds"], "s (CPU)", "below 5", values["seconds"] < 5))
    for dimension in (10_000, 1_000_000):
        values = apart(noise, dimension)
        name = f"noise of one release, d={dimension:,}"
        rows += [
            Result(name, 1e9 * values["seconds"] / dimension, "ns a coordinate (CPU)"),
            Result(f"{name}: memory", values["peak"] / dimension, "bytes a coordinate"),
        ]
    return rows


if __name__ == "__main__":
    write_results(OUT, main(), show=True)
