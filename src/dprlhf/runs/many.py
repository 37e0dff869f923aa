"""Many measurements side by side, each kept in a file: the same call continues what was stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dprlhf.runs.folder import write_atomically


def run_missing(
    work: Callable[..., Any],
    jobs: Mapping[Path, Sequence[Any]],
    *,
    side_by_side: int = 1,
    write_only: bool = False,
    label: str = "",
    quiet: bool = False,
) -> dict[Path, Any]:
    """Run every job whose file is missing, and return the content of all finished files."""
    done = {file: json.loads(file.read_text("utf-8")) for file in jobs if file.exists()}
    missing = {} if write_only else {f: given for f, given in jobs.items() if f not in done}
    with tqdm(total=len(jobs), initial=len(done), desc=label, disable=quiet, unit="run") as bar:
        if side_by_side <= 1:
            for file, given in missing.items():
                done[file] = _run_and_keep(work, file, given)
                bar.update(1)
        elif missing:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(
                side_by_side, mp_context=context, initializer=_end_with_caller
            ) as pool:
                pending = {
                    pool.submit(_run_and_keep, work, f, given): f for f, given in missing.items()
                }
                for ended in as_completed(pending):
                    done[pending[ended]] = ended.result()
                    bar.update(1)
    return {file: done[file] for file in jobs if file in done}


def _run_and_keep(work: Callable[..., Any], file: Path, given: Sequence[Any]) -> Any:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(work(*given))
    write_atomically(file, text)
    return json.loads(text)


def _end_with_caller() -> None:
    """End this process when the one that started it is killed; it would hold its run for hours."""
    caller = multiprocessing.parent_process()
    assert caller is not None

    def wait() -> None:
        caller.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
