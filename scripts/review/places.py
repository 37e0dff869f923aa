"""Fixed places: which kernels the check at the start accepts, and what neighbours move.

Writes rows to ``docs/results/places.json``::

    PYTHONPATH=src python -m scripts.review.places
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "places.json"
sys.path.insert(0, str(ROOT / "tests"))

from dprlhf.runs.measurements import Result, write_results  # noqa: E402


def verdicts() -> list[Result]:
    """Try the check at the start, and neighbouring rounds, on stand-in kernels."""
    from dprlhf.errors import DprlhfError
    from dprlhf.training import layout
    from helpers import kernels
    from rollout.test_rollout import neighbours, policy_of
    from training.test_layout import check, shapes_of
    from training.test_layout import policy_of as of_layout

    stand_ins = {
        "its place": (kernels.by_place, True),
        "the shape": (kernels.by_shape, True),
        "the contents of other rows": (kernels.by_contents, False),
        "chance": (kernels.at_random(), False),
    }
    found = []
    for name, (kernel, sound) in stand_ins.items():
        made, accepted = of_layout(), True
        kernels.attach(made, kernel)
        layout._KNOWN.clear()
        try:
            check(made, shapes_of())
        except DprlhfError:
            accepted = False
        found.append(
            Result(
                f"accepted at the start: a kernel in which a row rounds by {name}",
                float(accepted),
                "1",
                "accepted" if sound else "refused",
                accepted == sound,
            )
        )
        if sound:
            tiny_policy = policy_of("gpt2", torch.float32)
            kernels.attach(tiny_policy, kernel)
            _, whole = neighbours(tiny_policy, [])
            moved = 0
            for absent in range(6):
                _, fewer = neighbours(tiny_policy, [absent])
                moved += sum(
                    not torch.equal(a, b)
                    for user, (a, b) in enumerate(zip(whole, fewer, strict=True))
                    if user != absent
                )
            what = "contributions of others that a blank user moves by a bit, of 30"
            found.append(Result(f"{what}: rounding by {name}", moved, "1", "0", moved == 0))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_results(OUT, verdicts())
