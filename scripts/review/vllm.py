"""vLLM itself: tests that pass on it, how far its log-probabilities are, whether rows are apart.

``bash scripts/vllm_check.sh`` installs its CPU engine and calls this. With ``--gpu`` (extra
``vllm``, ``VLLM_BATCH_INVARIANT=1``) the same is measured there, without the tests, and the checks
of a run stay as they are. Writes rows to ``docs/results/places.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dprlhf.errors import DprlhfError
from dprlhf.rollout import vllm as backend
from dprlhf.runs.measurements import Result, at_most, write_results
from helpers.sampled import draw, five
from rollout.test_vllm import gaps, on_cpu, policy_in, save_model

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "places.json"

GPU = "VLLM_BATCH_INVARIANT=1 python -m scripts.review.vllm --gpu"
ON_GPU = "runs of vLLM in its batch-invariant mode on a GPU"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FARTHEST = {"float32": 1e-4, "bfloat16": 0.1}


def tests() -> Result:
    """Run the tests of vLLM, none of which is skipped where it is installed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/rollout/test_vllm.py"], cwd=ROOT, capture_output=True, text=True
    )
    found = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", tail(done.stdout))}
    good = found.keys() == {"passed"}
    name = f"tests of vLLM passed with vllm {importlib.import_module('vllm').__version__}"
    return Result(name, found.get("passed", 0), "tests", "all", good)


def tail(text: str) -> str:
    """Return what pytest counts in its last line: "25 passed in 76.15s"."""
    lines = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return lines[-1].partition(" in ")[0] if lines else ""


@contextlib.contextmanager
def engine_on_cpu(dtype: str) -> Iterator[None]:
    """Let the CPU engine pass, in float32, too, which a run does not offer."""
    vllm: Any = importlib.import_module("vllm")
    start = vllm.LLM
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        patch.setenv("OMP_NUM_THREADS", "2")  # on one, no row was seen to move another
        patch.setattr(backend, "_refuse", lambda policy: None)
        patch.setattr(vllm, "LLM", lambda **given: start(**{**given, "dtype": dtype}))
        yield


def of_engine(dtype: str, where: str) -> Iterator[Result]:
    """Start vLLM, compare its log-probabilities with transformers', and try its rows."""
    with tempfile.TemporaryDirectory() as folder:
        policy = policy_in(save_model(Path(folder)), DTYPES[dtype])
        if where:
            policy.model.cuda()
        rows = draw(policy, five(), backend="vllm", responses=32, base_policy="reference")
        far = float(gaps(policy, rows).mean())
        words = f"mean |Δ log p| of a token, vLLM{where} and transformers, {dtype}"
        yield at_most(words, far, "nats", FARTHEST[dtype])
        try:
            backend.check_rows(policy, rows=40, prompt=150, response=100)
            refused = False
        except DprlhfError as error:
            refused = "alone than" in str(error)
        how = where or " without the mode, on 2 threads"
        words = f"refused by the check of rows: vLLM{how}, {dtype}"
        yield Result(words, float(refused), "1", "0" if where else "1", refused != bool(where))
        backend.engine.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true")
    if parser.parse_args().gpu:
        done = Result(ON_GPU, 1, "runs", "at least 1", True, command=GPU)
        write_results(OUT, [*of_engine("bfloat16", " on a GPU"), done])
        return
    found = [tests()]
    for dtype in DTYPES:
        with engine_on_cpu(dtype), mock.patch.dict("os.environ"):
            found += of_engine(dtype, "")
    found = [replace(row, command="bash scripts/vllm_check.sh") for row in found]
    if not OUT.exists() or ON_GPU not in OUT.read_text("utf-8"):  # where none was measured yet
        found.append(Result(ON_GPU, 0, "runs", "at least 1", False, command=GPU))
    write_results(OUT, found, show=True)


if __name__ == "__main__":
    main()
