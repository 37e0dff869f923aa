"""A thousand random plans by several accountants, and the test vectors of ``docs/vectors.json``.

    python -m scripts.soundness.accountants

Which answer is exact, and for what: dp-accounting's analytic Gaussian for disjoint batches; opacus'
PRV accountant for Poisson sampling, in an interval of 0.1% of ε to each side; and, for random
allocation with one participation, the direct convolution below, which shares no code with the
package. pld-accounting brackets random allocation within about 1.5%. Rényi accountants, and grids
that round losses up, are upper bounds.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import fft
from scipy.optimize import brentq
from scipy.special import ndtr

from dprlhf.privacy.accounting import Mechanism, epsilon
from dprlhf.privacy.partitions.base import round_noise
from dprlhf.privacy.risk import risk
from dprlhf.runs.measurements import Result, at_least, at_most, write_results
from helpers import accountants

ROOT = Path(__file__).resolve().parents[2]

SEED = 20_261_123
COUNTS = {"disjoint": 440, "random-allocation": 500, "poisson": 40, "several": 20}
VECTORS = {"disjoint": 20, "random-allocation": 30, "poisson": 5, "several": 5}
BRACKETED = 20
"""Number of plans with one participation that pld-accounting brackets as well; it takes seconds."""
WITHIN = 5e-3


def direct(mechanism: Mechanism, delta: float) -> float:
    """Return ε of one-out-of-T allocation by a plain convolution of cell masses, both sides.

    The mass of each cell stands at its middle: no tilting, no rounding up, no bound of any kind.
    """
    sigma, rounds = 1 / round_noise(mechanism), mechanism.rounds
    top = math.exp(sigma * (6.5 + sigma) - sigma * sigma / 2) + 3 * rounds
    size = 2 ** math.ceil(math.log2(max(top / 0.02, 2**16)))
    cell = top / size
    edges = np.arange(size + 1) * cell
    with np.errstate(divide="ignore"):
        masses = np.diff(ndtr(np.log(edges) / sigma + sigma / 2))
    sums = fft.irfft(fft.rfft(masses, 2 * size) ** rounds, 2 * size)
    mean = (np.arange(2 * size) + rounds / 2) * cell / rounds  # of a sum's T middles

    def missing(e: float) -> float:
        c = math.exp(e)
        remove = float(sums @ np.maximum(mean - c, 0))
        return max(remove, float(sums @ np.maximum(1 - c * mean, 0))) - delta

    return 0.0 if missing(0.0) <= 0 else float(brentq(missing, 0, 60, xtol=1e-9))


def plans(kind: str, count: int) -> list[tuple[Mechanism, float]]:
    """Return random plans of one kind with their δ, such that ε is below 20."""
    rng = np.random.default_rng([SEED, sorted(COUNTS).index(kind)])
    found: list[tuple[Mechanism, float]] = []
    while len(found) < count:
        releases = int(rng.choice([1, 1, 2, 4]))
        z = float(np.exp(rng.uniform(math.log(0.7), math.log(4)))) * math.sqrt(releases)
        delta = float(rng.choice([1e-5, 1e-6, 1e-7]))
        rounds = int(rng.integers(2, 65))
        passes = 1
        partition, adjacency = "random-allocation", rng.choice(["zero-out", "add-remove"])
        if kind == "disjoint":
            partition, adjacency = (
                rng.choice(["fixed", "stream"]),
                rng.choice(["zero-out", "replace-one"]),
            )
        elif kind == "poisson":
            partition, passes = "poisson", int(rng.integers(1, min(rounds, 4)))
        elif kind == "several":
            passes = int(rng.integers(2, 4))
            rounds = passes * int(rng.integers(3, 9))
        mechanism = Mechanism(z, rounds, str(partition), str(adjacency), passes, releases)  # type: ignore[arg-type]
        found.append((mechanism, delta))
    return found


def compare(kind: str, index: int, mechanism: Mechanism, delta: float) -> dict[str, Any]:
    """Return our ε of a plan, that of the reference, and the other's bounds on the same ε."""
    ours = epsilon(mechanism, delta)
    row: dict[str, Any] = {
        "kind": kind, **asdict(mechanism), "delta": delta, "epsilon": ours.epsilon,
        "epsilon_lower": ours.epsilon_lower, "reference": None, "lower": None, "upper": None,
    }  # fmt: skip
    if kind == "disjoint":
        row["confirmed_by"] = "dp-accounting, analytic Gaussian"
        row["reference"] = accountants.google_analytic(mechanism, delta)
    elif kind == "poisson":
        lower, upper = accountants.opacus_prv(mechanism, delta)
        row |= {"lower": lower, "upper": upper, "confirmed_by": "opacus, PRV"}
        row["reference"] = (lower + upper) / 2
    else:
        row["confirmed_by"] = "direct convolution (scripts/soundness/accountants.py)"
        if kind == "random-allocation":
            row["reference"] = direct(mechanism, delta)
        if kind == "several" or index < BRACKETED:
            lower, upper = accountants.feldman_shenfeld(mechanism, delta)
            row |= {"lower": lower, "upper": upper}
        if kind == "several":
            row["confirmed_by"] = "pld-accounting, bracket"
    return row


def results(rows: list[dict[str, Any]]) -> list[Result]:
    """Return what the comparison showed, as rows of ``docs/results/soundness.json``."""
    start = "accountants"
    out = [at_least(f"{start}: random plans compared", len(rows), "plans", 1000)]
    for kind in ("disjoint", "random-allocation", "poisson"):
        some = [r for r in rows if r["kind"] == kind]
        worst = max(abs(r["epsilon"] - r["reference"]) / max(r["reference"], 0.01) for r in some)
        name = f"{start}: {kind}, largest difference to {some[0]['confirmed_by']}"
        out.append(at_most(name, worst, "of ε", WITHIN))
    bracketed = [r for r in rows if r["lower"] is not None]
    inside = sum(r["lower"] <= r["epsilon"] * (1 + 1e-9) for r in bracketed)
    below = sum(r["epsilon_lower"] <= r["upper"] * (1 + 1e-9) for r in bracketed)
    loose = sum(r["epsilon"] <= r["upper"] * (1 + 1e-3) for r in bracketed)
    total = len(bracketed)
    for what, count in (
        ("our upper bound is not below the other's lower one", inside),
        ("our lower bound is not above the other's upper one", below),
        ("our upper bound is at most 0.1% above the other's", loose),
    ):
        name = f"{start}: {what}, of {total} with a bracket"
        out.append(Result(name, count, "plans", f"all {total}", count == total))
    return out


def vectors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first plans of each kind as test vectors, ε with 12 digits."""
    names = (
        "partition", "adjacency", "rounds", "participations", "releases_per_round",
        "noise_multiplier", "delta", "epsilon", "confirmed_by", "reference", "lower", "upper",
    )  # fmt: skip
    listed = []
    for kind, count in VECTORS.items():
        for row in [r for r in rows if r["kind"] == kind][:count]:
            shown = {name: row[name] for name in names if row[name] is not None}
            for name in {"epsilon", "reference", "lower", "upper"} & shown.keys():
                shown[name] = float(f"{shown[name]:.12g}")
            shown["risk"] = stated_risk(shown)
            listed.append(shown)
    return {
        "about": "epsilon is dprlhf's upper bound at delta; reference, or lower and upper, is what"
        " the accountant under confirmed_by says of the same plan. noise_multiplier is the noise's"
        " standard deviation over the clip norm S, under every adjacency; J releases a round are"
        " one with noise_multiplier / sqrt(J); under replace-one one user moves a sum by 2S. risk"
        " has upper bounds on a guess about one user at even odds, on the true-positive rate at"
        " each false-positive rate, and on the mu of Gaussian DP but for delta.",
        "vectors": listed,
    }


def stated_risk(vector: dict[str, Any]) -> dict[str, Any]:
    """Return our bounds on what a guess gains under a vector's plan, with 12 digits."""
    names = [field for field in Mechanism.__dataclass_fields__ if field in vector]
    found = risk([Mechanism(**{name: vector[name] for name in names})], vector["delta"])
    rates = {fpr: float(f"{tpr:.12g}") for fpr, tpr in found.tpr_at_fpr.items()}
    guess, mu = (float(f"{value:.12g}") for value in (found.best_guess, found.gdp_mu))
    return {"best_guess": guess, "tpr_at_fpr": rates, "gdp_mu": mu}


def main() -> None:
    """Compare all plans, and write the rows and the vectors."""
    rows = []
    for kind, count in COUNTS.items():
        for index, (mechanism, delta) in enumerate(plans(kind, count)):
            rows.append(compare(kind, index, mechanism, delta))
        print(f"{kind}: {count} plans", file=sys.stderr, flush=True)
    write_results(ROOT / "docs" / "results" / "soundness.json", results(rows), show=True)
    text = json.dumps(vectors(rows), indent=1)
    (ROOT / "docs" / "vectors.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
