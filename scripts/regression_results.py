"""Measure the error of the private least-squares oracles against the number of users.

Features are uniform on the unit sphere of R^d, targets A = w* · φ + noise, noise uniform in ±1/2,
‖w*‖ = √d / 2, so that w* · φ has variance 1/4. The error is err² = E(w · φ − w* · φ)² on fresh
features, averaged over repetitions; plain least squares has about d / (12 m).

Writes ``docs/results/utility.json``, ``docs/results/regression.md`` and
``docs/images/regression.png``. Takes a few minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

DOCS = Path(__file__).resolve().parents[1] / "docs"
sys.path.insert(0, str(DOCS.parent))

from dprlhf.errors import DprlhfError  # noqa: E402
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from papers.regression import ISSP, Exponential, Oracle, SufficientStatistics, descent, fit  # noqa: E402

DIMENSIONS = (5, 50)
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
USERS = tuple(round(200 * 10 ** (i / 4)) for i in range(9))
DELTA = 1e-6
ADJACENCY = "zero-out"
TARGET_BOUND = 2.0
COROLLARY = {"exponential": 1, "issp": 2, "improper-batch-sgd": 3}
NAMES = ("exponential", "sufficient-statistics", "issp", "projected-sgd", "improper-batch-sgd")
DRAWS = {"exponential": 4}
"""Fits of the same users; its error has one degree of freedom, and varies most."""
STEEP = -0.75
"""A slope below this counts as about -1: with few repetitions it errs by 0.1 or so."""
SIGNAL = 0.25

Array = NDArray[np.float64]
Errors = dict[tuple[str, int, float], list[float]]


def problem(users: int, d: int, seed: int) -> tuple[Array, Array, Array]:
    """Return features, targets and w*; w* is the same for every number of users."""
    truth = np.random.default_rng([seed, d]).normal(size=d)
    truth *= math.sqrt(d) / 2 / np.linalg.norm(truth)
    rng = np.random.default_rng([seed, d, users])
    x = rng.normal(size=(users, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x, x @ truth + rng.uniform(-0.5, 0.5, users), truth


def build(name: str, d: int, users: int, epsilon: float, truth: Array) -> Oracle:
    """Return the oracle with its public settings; only the line search uses ``truth``."""
    radius = math.sqrt(d)  # twice what is needed
    if name == "exponential":
        line = np.linspace(-1, 1, 400)[:, None] * radius  # w* is not on the grid
        return Exponential(line * truth / np.linalg.norm(truth), TARGET_BOUND)
    if name == "sufficient-statistics":
        return SufficientStatistics(1, TARGET_BOUND, radius)
    if name == "issp":
        return ISSP(1, TARGET_BOUND, residual_bound=0.75, leverage=1.5)
    return descent(
        name, users, d, epsilon=epsilon, delta=DELTA, adjacency=ADJACENCY, feature_bound=1,
        target_bound=TARGET_BOUND, radius=radius, most=30,
        step_size=d / 2,  # the curvature of such features is B²/d
    )  # fmt: skip


def repetitions(users: int) -> int:
    """More for few users, which cost little and whose errors vary most."""
    return max(4, min(20, 40_000 // users))


def mean_square(values: Array) -> float:
    return float((values**2).mean())


def measure() -> tuple[Errors, dict[int, list[float]]]:
    """Return err² of each (oracle, d, ε) and of plain least squares (d), for each of USERS."""
    private: Errors = {}
    plain: dict[int, list[float]] = {}
    work = len(DIMENSIONS) * sum(users * repetitions(users) for users in USERS)
    bar = tqdm(total=work, unit="users", unit_scale=True)
    for d in DIMENSIONS:
        fresh = problem(5000, d, 10**6)[0]
        sums: dict[Any, Array] = {}
        for i, users in enumerate(USERS):
            for seed in range(repetitions(users)):
                x, y, truth = problem(users, d, seed)
                target = fresh @ truth
                errors: dict[Any, float] = {
                    "plain": mean_square(fresh @ np.linalg.lstsq(x, y)[0] - target)
                }
                for name, epsilon in itertools.product(NAMES, EPSILONS):
                    before = sums.get((name, d, epsilon))
                    if before is not None and math.isnan(before[i]):
                        continue  # refused
                    errors[name, d, epsilon] = 0.0
                    for _ in range(DRAWS.get(name, 1)):
                        try:
                            found = fit(
                                build(name, d, users, epsilon, truth),
                                x,
                                y,
                                epsilon=epsilon,
                                delta=0.0 if name == "exponential" else DELTA,
                                adjacency=ADJACENCY,
                            )
                            guess = found.predict(torch.from_numpy(fresh)).numpy()
                        except DprlhfError:  # ISSP, with too few users for d
                            guess = np.full(len(fresh), math.nan)
                        error = mean_square(guess - target)
                        errors[name, d, epsilon] += error / DRAWS.get(name, 1)
                for key, error in errors.items():
                    sums.setdefault(key, np.zeros(len(USERS)))[i] += error / repetitions(users)
                bar.update(users)
        plain[d] = sums.pop("plain").tolist()
        private.update({key: value.tolist() for key, value in sums.items()})
    bar.close()
    return private, plain


def slope(name: str, errors: list[float], plain: list[float]) -> float:
    """Fit log err² against log m beyond the private regime; NaN with fewer than 3 such points.

    That is where privacy at most doubles the error of plain least squares, at this m and all larger
    ones. The exponential mechanism's private term falls like 1/m, too, so its regime ends where the
    error is below a tenth of the signal.
    """
    limit = [SIGNAL / 10] * len(USERS) if name == "exponential" else [2 * p for p in plain]
    first = len(USERS)
    while first and errors[first - 1] <= limit[first - 1]:
        first -= 1
    if len(USERS) - first < 3:
        return math.nan
    return float(np.polyfit(np.log(USERS[first:]), np.log(errors[first:]), 1)[0])


def rows(private: Errors, plain: dict[int, list[float]]) -> list[Result]:
    out = [
        Result(f"regression/plain/d={d}/error", plain[d][-1], f"err² at m={USERS[-1]}")
        for d in DIMENSIONS
    ]
    for (name, d, epsilon), errors in private.items():
        start = f"regression/{name}/d={d}/epsilon={epsilon:g}"
        if math.isfinite(errors[-1]):
            out.append(Result(f"{start}/error", errors[-1], f"err² at m={USERS[-1]}"))
        found = slope(name, errors, plain[d])
        if math.isfinite(found):
            number = COROLLARY.get(name)
            goal = f"about -1 beyond the private regime (HZ Corollary {number})" if number else ""
            out.append(
                Result(
                    f"{start}/slope", found, "log err² / log m", goal,
                    found <= STEEP if number else None,
                )
            )  # fmt: skip
    return out


def table(private: Errors, plain: dict[int, list[float]]) -> str:
    lines = [
        "# Private least squares: error against users",
        "",
        f"Written by `scripts/regression_results.py`: err² at m = {USERS[-1]:,} users, mean of"
        f" {repetitions(USERS[-1])} repetitions (more for fewer users), δ = {DELTA:g} (0 for"
        f" `exponential`), adjacency {ADJACENCY}. In brackets: the slope of log err² against log m"
        " beyond the private regime (where privacy at most doubles plain least squares; for"
        f" `exponential`, err² below {SIGNAL / 10:g}); no bracket: fewer than three such m up to"
        f" {USERS[-1]:,}. Predicting 0 has err² = {SIGNAL}."
        " `exponential` searches along one public direction that happens to be right, so it is not"
        " to be compared with the others.",
    ]
    for d in DIMENSIONS:
        lines += [
            "",
            f"d = {d}; plain least squares {plain[d][-1]:.2g}",
            "",
            "| oracle | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |",
            "|---" * (len(EPSILONS) + 1) + "|",
        ]
        for name in NAMES:
            cells = []
            for epsilon in EPSILONS:
                errors = private[name, d, epsilon]
                found = slope(name, errors, plain[d])
                cell = f"{errors[-1]:.2g}" if math.isfinite(errors[-1]) else "refused"
                cells.append(cell + (f" ({found:.2f})" if math.isfinite(found) else ""))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(private: Errors, plain: dict[int, list[float]], path: Path) -> None:
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = (0.5, 2.0, 8.0)
    figure, axes = plt.subplots(
        len(DIMENSIONS), len(shown), figsize=(10, 6), sharex=True, sharey=True
    )
    for line, d in zip(axes, DIMENSIONS, strict=True):
        for axis, epsilon in zip(line, shown, strict=True):
            axis.loglog(USERS, plain[d], "k--", label="plain least squares")
            for name in NAMES:
                axis.loglog(USERS, private[name, d, epsilon], "o-", ms=3, lw=1, label=name)
            axis.set_title(f"d = {d}, ε = {epsilon:g}", fontsize=9)
            axis.grid(alpha=0.3, which="major")
        line[0].set_ylabel("err²")
    for axis in axes[-1]:
        axis.set_xlabel("users m")
    axes[0, 0].legend(fontsize=6)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="where results/ and images/ are")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    private, plain = measure()
    write_results(arguments.out / "results" / "utility.json", rows(private, plain))
    text = table(private, plain)
    (arguments.out / "results" / "regression.md").write_text(text)
    plot(private, plain, arguments.out / "images" / "regression.png")
    print(text)


if __name__ == "__main__":
    main()
