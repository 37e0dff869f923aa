"""Two hundred plans: is the stated risk never below the true one, and at most 1% above?

Also the seconds of a plan for a guess, and how many of 100 audits stay below the stated guess.

Writes rows to ``docs/results/risk.json``. The truth is a closed form for disjoint batches, a plain
convolution of the likelihood ratio's cells for random allocation and Poisson sampling, and for all
plans a simulation of the likelihood ratio. riskcal and gdpnum are asked where they are installed::

    PYTHONPATH=src python -m scripts.review.risk [plans] [seconds] [audits] [--label TEXT]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import fft
from scipy.special import ndtr
from scipy.stats import beta, norm

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "risk.json"
sys.path.insert(0, str(ROOT / "tests"))

from dprlhf.audit.one_run import audit_plan  # noqa: E402
from dprlhf.privacy.accounting import Mechanism  # noqa: E402
from dprlhf.privacy.max_guess import plan_within  # noqa: E402
from dprlhf.privacy.plan import make_plan  # noqa: E402
from dprlhf.privacy.risk import FALSE_POSITIVES, risk  # noqa: E402
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from helpers.risks import Floats, simulated  # noqa: E402

DELTA = 1e-5
CELL = 2e-4  # of log L
DRAWS = 2**17
COUNTS = {
    "disjoint": 60, "random allocation": 50, "random allocation, little noise": 10,
    "several passes": 20, "poisson": 20, "replace-one": 20,
    "replace-one, several passes": 10, "correlated": 10,
}  # fmt: skip
GUESSES = (0.55, 0.7)
ASKED: dict[str, dict[str, Any]] = {
    "fixed": {"rounds": 50, "partition": "fixed"},
    "random allocation": {"rounds": 100},
    "3 passes": {"rounds": 48, "participations": 3},
    "poisson": {"rounds": 50, "partition": "poisson", "participations": 2},
    "replace-one": {"rounds": 16, "adjacency": "replace-one"},
    "replace-one, 2 passes": {"rounds": 32, "participations": 2, "adjacency": "replace-one"},
    "4 bands, 16 rounds": {"rounds": 16, "bands": 4},
    "8 bands, 64 rounds": {"rounds": 64, "bands": 8},
}
EXACT = ("random allocation", "several passes", "poisson")


def plans(kind: str, count: int) -> list[Mechanism]:
    """Return random plans of one kind."""
    rng = np.random.default_rng([20_261_127, sorted(COUNTS).index(kind)])
    found = []
    for _ in range(count):
        size, passes = int(rng.integers(2, 17)), int(rng.integers(2, 4))
        # With less noise the plain convolution's cells are too wide, and the simulation judges.
        ends = (0.5, 0.8) if "little" in kind else (0.8, 3)
        z = float(np.exp(rng.uniform(*np.log(ends))))
        releases = 1 if kind == "correlated" else int(rng.choice([1, 2]))
        given: dict[str, Any] = {"rounds": size, "releases_per_round": releases}
        if kind == "disjoint":
            given["partition"] = str(rng.choice(["fixed", "stream"]))
            given["adjacency"] = str(rng.choice(["zero-out", "replace-one"]))
        elif kind == "poisson":
            given |= {"partition": "poisson", "participations": min(passes, size - 1)}
        elif kind == "correlated":
            given["bands"] = int(rng.integers(2, size + 1))
        if "replace" in kind:
            given["adjacency"] = "replace-one"
            z *= 2
        if "passes" in kind:
            given |= {"rounds": passes * size, "participations": passes}
        found.append(Mechanism(z * math.sqrt(releases), **given))
    return found


def binned(logs: Floats, masses: Floats, cells: int) -> Floats:
    """Return the masses of log L on a grid around zero, ``[cells]``."""
    at = np.clip(np.rint(logs / CELL).astype(int) + cells // 2, 0, cells - 1)
    return np.bincount(at, weights=masses, minlength=cells)


def convolved(plan: Mechanism) -> list[float]:
    """Return the best guess and the hit rates, from the law of log L without the user.

    Each cell's mass stands at its middle: no tilting, no rounding up, no bound of any kind.
    """
    z = plan.noise_multiplier / math.sqrt(plan.releases_per_round)
    cells, x = 2**19, np.linspace(-12, 12, 2_000_001)
    masses = np.diff(ndtr(x))
    middles = np.exp((x[1:] + x[:-1]) / 2 / z - 0.5 / z**2)
    if plan.partition == "poisson":
        q, factors = plan.participations / plan.rounds, plan.rounds
        logs = np.log1p(q * (middles - 1))
    else:
        factors = plan.participations
        slots = plan.rounds // factors
        top = 2 * slots + float(np.exp(6 / z + 0.5 / z**2))
        size = 2**21
        edges = np.linspace(0, top, size + 1)
        with np.errstate(divide="ignore"):
            own = np.diff(ndtr(np.log(edges) * z + 0.5 / z))
        sums = fft.irfft(fft.rfft(own, 2 * size) ** slots, 2 * size)
        masses, logs = sums, np.log((np.arange(2 * size) + slots / 2) * top / size / slots)
    one = binned(logs, masses, cells)
    ratio = np.exp((np.arange(cells) - cells // 2) * CELL)

    def composed(own: Floats) -> Floats:
        law = fft.irfft(fft.rfft(np.fft.ifftshift(own)) ** factors, cells)
        return np.maximum(np.fft.fftshift(law), 0.0)

    # Each law by itself: one times the ratio would magnify the rounding of the other's tail.
    without, with_ = composed(one), composed(one * ratio)
    miss, hit = (np.append(0.0, np.cumsum(side[::-1])) for side in (without, with_))
    guess = float((1 + (hit - miss).max()) / 2)
    rates = [
        max(float(np.interp(a, miss, hit)), float(np.interp(a, 1 - hit[::-1], 1 - miss[::-1])))
        for a in FALSE_POSITIVES
    ]
    return [guess, *rates]


def closed(plan: Mechanism) -> list[float]:
    """Return the best guess and the hit rates of one Gaussian."""
    moves = 2 if plan.adjacency == "replace-one" else 1
    mu = moves * math.sqrt(plan.releases_per_round) / plan.noise_multiplier
    return [float(norm.cdf(mu / 2)), *norm.cdf(norm.ppf(FALSE_POSITIVES) + mu).tolist()]


def library(plans_: list[Mechanism]) -> list[Result]:
    """Return how far riskcal and gdpnum are from what is stated for Poisson sampling."""
    try:
        from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
        from gdpnum import PLDConverter
        from riskcal.analysis import get_beta_from_pld
    except ImportError:
        return []
    below, above, mus = 0.0, 0.0, []
    for plan in plans_:
        z = plan.noise_multiplier / math.sqrt(plan.releases_per_round)
        q = plan.participations / plan.rounds
        law = from_gaussian_mechanism(z, sampling_prob=q, value_discretization_interval=1e-3)
        law = law.self_compose(plan.rounds)
        stated = risk([plan], DELTA)
        for fpr, tpr in stated.tpr_at_fpr.items():
            other = 1 - float(get_beta_from_pld(law, float(fpr)))
            below, above = max(below, other / tpr - 1), max(above, tpr / other - 1)
        mu, _ = PLDConverter(law).get_mu_and_regret()
        mus.append(stated.gdp_mu / float(mu))
    kind = f"risk: poisson, {len(plans_)} plans: "
    return [
        Result(f"{kind}stated hit rates below riskcal's, which round up", below, "relative"),
        Result(f"{kind}stated hit rates above riskcal's", above, "relative", "at most 0.01",
               above <= 0.01),
        Result(f"{kind}gdp_mu over gdpnum's mu, largest", max(mus), "ratio", "at most 1.01",
               max(mus) <= 1.01),
    ]  # fmt: skip


def compare(kind: str) -> tuple[list[Result], list[float]]:
    """Return the rows of all plans of one kind, and the CPU seconds of each."""
    count, seconds = COUNTS[kind], []
    low, high, below, loose, within = [], [], 0, 0.0, 0
    for index, plan in enumerate(plans(kind, count)):
        begun = time.process_time()
        found = risk([plan], DELTA)
        seconds.append(time.process_time() - begun)
        stated = [found.best_guess, *found.tpr_at_fpr.values()]
        if kind in EXACT or kind == "disjoint":
            exact = closed(plan) if kind == "disjoint" else convolved(plan)
            low.append(max(e / s - 1 for e, s in zip(exact, stated, strict=True)))
            high.append(max(s / e - 1 for e, s in zip(exact, stated, strict=True)))
        if kind != "disjoint":
            drawn = simulated(plan, DRAWS, index)
            pairs = list(zip(stated, drawn, strict=True))
            below += any(s < v - 4 * e for s, (v, e) in pairs)
            within += all(s <= 1.01 * (v + 4 * e) for s, (v, e) in pairs)
            loose = max(loose, *(s / (v + 4 * e) - 1 for s, (v, e) in pairs))
    start, rows = f"risk: {kind}, {count} plans: ", []
    if low:
        rows += [
            Result(f"{start}exact figures above the stated ones", max(low), "relative",
                   "at most 1e-4, the error of the exact one", max(low) <= 1e-4),
            Result(f"{start}stated figures above the exact ones", max(high), "relative",
                   "at most 0.01", max(high) <= 0.01),
        ]  # fmt: skip
    if kind != "disjoint":
        rows += [
            Result(f"{start}simulated above stated by 4 standard errors", below, "plans",
                   "0", below == 0),
            Result(f"{start}stated at most 1% above simulated and 4 standard errors", within,
                   "plans", f"all {count}", within == count),
            Result(f"{start}stated above simulated and 4 standard errors", loose, "relative"),
        ]  # fmt: skip
    for row in rows:
        print(row.name, row.value, row.holds, flush=True)
    return rows, seconds


def timed(asked: tuple[str, float]) -> float:
    """Return the CPU seconds of a plan for a guess, with its ε."""
    begun = time.process_time()
    plan_within(asked[1], users=1000, delta=DELTA, **ASKED[asked[0]])
    return time.process_time() - begun


def time_plans(label: str) -> list[Result]:
    """Return rows of seconds, each plan in processes of its own: nothing is remembered."""
    rows = []
    with multiprocessing.Pool(1, maxtasksperchild=1) as pool:
        for kind in ASKED:
            slowest = 0.0
            for guess in GUESSES:
                took = pool.map(timed, [(kind, guess)] * 3, chunksize=1)
                slowest = max(slowest, float(np.median(took)))
            goal, holds = ("", None) if label else ("at most 4", slowest <= 4)
            name = f"risk: CPU seconds of a plan for a guess{label}: {kind}"
            rows.append(Result(name, slowest, "s, median of 3, slower of 2", goal, holds))
            print(name, slowest, flush=True)
    return rows


def audited(count: int = 100) -> list[Result]:
    """Return in how many audits the empirical best guess refutes the stated one at 95%."""
    rows = []
    for partition in ("random-allocation", "fixed", "stream", "poisson"):
        plan = make_plan(users=568, rounds=8, delta=DELTA, epsilon=4.0, partition=partition)
        stated, below = risk([plan.mechanism], DELTA).best_guess, 0
        for _ in range(count):
            found = audit_plan(plan, secrets.token_bytes(32), state=False)
            wrong = found.guesses - found.right
            below += float(beta.ppf(0.05, found.right, wrong + 1)) <= stated
        name = f"risk: audits whose best guess, at 95%, is at most the stated one: {partition}"
        rows.append(Result(name, below, f"of {count}", "at least 95", below >= 95))
        print(name, below, flush=True)
    return rows


def compare_all() -> list[Result]:
    """Compare all plans, several kinds at a time."""
    rows, seconds = [], []
    with multiprocessing.Pool(2) as pool:
        for found, took in pool.imap_unordered(compare, COUNTS, chunksize=1):
            write_results(OUT, found)
            rows += found
            seconds += took
    rows += library(plans("poisson", COUNTS["poisson"])[:10])
    return [
        *rows,
        Result("risk: CPU seconds for a plan, median", float(np.median(seconds)), "s"),
        Result("risk: CPU seconds for a plan, longest", max(seconds), "s", "at most 4",
               max(seconds) <= 4),
    ]  # fmt: skip


def main() -> None:
    """Measure the parts that are named, all by default, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"seconds": None, "audits": audited, "plans": compare_all}
    parser.add_argument("parts", nargs="*", choices=[*parts, []])
    parser.add_argument("--label", default="", help="what to call the source that is timed")
    given = parser.parse_args()
    for name, measure in parts.items():
        if not given.parts or name in given.parts:
            write_results(OUT, measure() if measure else time_plans(given.label))


if __name__ == "__main__":
    main()
