"""Fixed places: which kernels the check at the start accepts, what neighbours move, what it costs.

Writes rows to ``docs/results/places.json``. The cost of one width needs an older source, in which
prompts of one padded width went together::

    PYTHONPATH=src python -m scripts.review.places --before ../before/src
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "places.json"
sys.path.insert(0, str(ROOT / "tests"))

from dprlhf import recipe  # noqa: E402
from dprlhf.boundary import Private  # noqa: E402
from dprlhf.data.users import Prompts  # noqa: E402
from dprlhf.gradients.clipping import Weighted, clipped_sum  # noqa: E402
from dprlhf.policies.loading import make_policy  # noqa: E402
from dprlhf.rollout import sample  # noqa: E402
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from helpers import tiny  # noqa: E402

USERS, REPEATS = 64, 1
MIXTURES = {  # prompt tokens: median and spread of a lognormal law, longest
    "reviews cut to 16 tokens": (40.0, 0.5, 16),
    "chat": (40.0, 0.8, 192),
    "maths": (60.0, 0.4, 128),
}


def policy() -> Any:
    """Return a policy of the shape that the script's rows name, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8192, n_positions=256, n_embd=256, n_layer=6, n_head=4)
    spec = recipe.Adapter(rank=8, target_modules=["c_attn", "c_proj", "c_fc"])
    return make_policy(GPT2LMHeadModel(config), tiny.tokenizer(), spec)


def seconds(mixture: str) -> float:
    """Return the processor time of a round on one thread, the median of some repeats."""
    median, spread, longest = MIXTURES[mixture]
    made, random, times = policy(), np.random.default_rng(0), []
    made.end_tokens = []
    everyone, slots = np.arange(USERS), np.zeros(USERS, dtype=np.int64)
    for number in range(1 + REPEATS):
        lengths = np.exp(np.log(median) + spread * random.standard_normal(USERS))
        texts: list[Any] = ["x" * int(n) for n in np.clip(lengths, 1, longest)]
        prompts = Prompts(texts, everyone, slots, {})
        if "round_users" in {field.name for field in fields(Prompts)}:
            prompts = replace(prompts, round_users=everyone)
        start = time.process_time()
        spec = recipe.Rollout(responses=2, max_new_tokens=32, batch_size=64)
        rows = sample(
            made, prompts, spec, key=bytes(32), context=(number,), max_prompt_tokens=longest,
            keep="gradients",
        )  # fmt: skip
        ones = np.ones(len(rows.user))
        clipped_sum(
            made, Private(Weighted(rows, ones, np.zeros((USERS, 0)), 0.0)), clip_norm=1.0,
            batch_size=64, reduce=lambda total: total,
        )  # fmt: skip
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def costs(before: str) -> list[Result]:
    """Compare the time of a round with that of an older source, in turns."""
    found = []
    for mixture in MIXTURES:
        times: dict[str, list[float]] = {"src": [], before: []}
        for _ in range(1):
            for side, values in times.items():
                environment = {**os.environ, "PYTHONPATH": f"{side}{os.pathsep}{ROOT}"}
                command = [sys.executable, "-m", "scripts.review.places", "--seconds", mixture]
                answer = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT
                )
                values.append(float(answer.stdout.split()[-1]))
        ratio = statistics.median(times["src"]) / statistics.median(times[before])
        compared = "processor time of a round on one thread, one width over width classes"
        name = f"{compared}: {mixture}, {USERS} prompts"
        found.append(Result(name, ratio, "1", "at most 1", ratio <= 1))
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before")
    parser.add_argument("--seconds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.seconds:
        print(seconds(given.seconds))
        return
    write_results(OUT, [*verdicts(), *(costs(given.before) if given.before else [])])


if __name__ == "__main__":
    main()
