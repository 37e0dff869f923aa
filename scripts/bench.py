"""Measure speed and memory as ratios of what runs side by side; writes docs/results/bench.json.

    python scripts/bench.py                      # everything, on an idle machine
    python scripts/bench.py --quick              # small models, few repeats: does it still work?
    python scripts/bench.py --parts overhead trl --device cuda

All sides of a ratio run in one process in alternation; a figure is the median of paired ratios,
with its quartiles as the spread.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

# Before the parts load torch: threads that spin starve each other where cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from dprlhf.runs.measurements import write_results

ON_A_GPU = 3  # repeats there, at most
PARTS = {  # name: (module, repeats, repeats of --quick)
    "overhead": ("bench.overhead", 7, 2),
    "opacus": ("bench.against_opacus", 5, 2),
    "trl": ("bench.against_trl", 3, 2),
    "logprobs": ("bench.logprobs", 9, 1),
    "sharing": ("bench.sharing", 5, 1),
}
OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "bench.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small models; keeps no results")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--results", type=Path, help=f"where to write (default {OUT.name})")
    options = parser.parse_args()
    quick = Path(tempfile.gettempdir()) / "bench-quick.json"
    out = options.results or (quick if options.quick else OUT)
    warnings.simplefilter("ignore")  # deprecations of the libraries
    for part in options.parts:
        module, repeats, few = PARTS[part]
        repeats = min(repeats, ON_A_GPU) if options.device == "cuda" else repeats
        for row in importlib.import_module(module).results(
            quick=options.quick, device=options.device, repeats=few if options.quick else repeats
        ):
            if options.quick:  # small models say nothing about a goal
                row = replace(row, goal="", holds=None)
            if options.device == "cuda":  # beside the rows of a CPU, not in their place
                row = replace(row, name=f"{row.name}, on a GPU")
            write_results(out, [row], show=True)  # at once: a long run may be interrupted


if __name__ == "__main__":
    main()
