"""Two hundred plans: is the stated risk never below the true one, and at most 1% above?

Also the seconds of a plan for a guess, how many of 100 audits stay below the stated guess, how near
an audit on a model of its own comes to the claim, and whether an erased user leaves a trace.

Writes rows to ``docs/results/risk.json``. The truth is a closed form for disjoint batches, a plain
convolution of the likelihood ratio's cells for random allocation and Poisson sampling, and for all
plans a simulation of the likelihood ratio. riskcal and gdpnum are asked where they are installed::

    python -m scripts.review.risk [plans] [seconds] [audits] [prompts] [erase]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from scipy import fft
from scipy.special import ndtr
from scipy.stats import beta, norm
from scripts.review.first_run import small_model

import dprlhf
from dprlhf.audit.one_run import CONFIDENCE, audit, audit_plan
from dprlhf.boundary import open_private
from dprlhf.privacy.accounting import Mechanism
from dprlhf.privacy.max_guess import plan_within
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import make_plan
from dprlhf.privacy.risk import FALSE_POSITIVES, risk
from dprlhf.recipe import make_recipe
from dprlhf.runs.measurements import Result, at_least, at_most, write_results
from dprlhf.runs.withdrawal import erase
from helpers import tiny
from helpers.fixed import KEY, fix_randomness
from helpers.risks import Floats, simulated

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "risk.json"

DELTA = 1e-5
CELL = 2e-4  # of log L
DRAWS = 2**17
COUNTS = {
    "disjoint": 60, "random allocation": 50, "random allocation, little noise": 10,
    "several passes": 20, "poisson": 20, "replace-one": 20,
    "replace-one, several passes": 10, "correlated": 10,
}  # fmt: skip
GUESSES = (0.55, 0.7)
CANARIES = 2_000
AUDITED: dict[str, dict[str, Any]] = {
    "fixed": {"partition": "fixed"}, "random allocation": {},
    "replace-one": {"adjacency": "replace-one"},
}  # fmt: skip
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
        at_most(f"{kind}stated hit rates above riskcal's", above, "relative", 0.01),
        at_most(f"{kind}gdp_mu over gdpnum's mu, largest", max(mus), "ratio", 1.01),
    ]


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
            at_most(f"{start}stated figures above the exact ones", max(high), "relative", 0.01),
        ]  # fmt: skip
    if kind != "disjoint":
        rows += [
            Result(f"{start}simulated above stated by 4 standard errors", below, "plans",
                   "0", below == 0),
            Result(f"{start}stated at most 1% above simulated and 4 standard errors", within,
                   "plans", f"all {count}", within == count),
            Result(f"{start}stated above simulated and 4 standard errors", loose, "relative"),
        ]  # fmt: skip
    return rows, seconds


def timed(asked: tuple[str, float]) -> float:
    """Return the CPU seconds of a plan for a guess, with its ε."""
    begun = time.process_time()
    plan_within(asked[1], users=1000, delta=DELTA, **ASKED[asked[0]])
    return time.process_time() - begun


def time_plans() -> list[Result]:
    """Return rows of seconds, each plan in processes of its own: nothing is remembered."""
    rows = []
    with multiprocessing.Pool(1, maxtasksperchild=1) as pool:
        for kind in ASKED:
            slowest = 0.0
            for guess in GUESSES:
                took = pool.map(timed, [(kind, guess)] * 3, chunksize=1)
                slowest = max(slowest, float(np.median(took)))
            name = f"risk: CPU seconds of a plan for a guess: {kind}"
            rows.append(at_most(name, slowest, "s, median of 3, slower of 2", 4))
    return rows


def audited(count: int = 100) -> list[Result]:
    """Return in how many audits the empirical best guess is at most the stated one."""
    rows = []
    for partition in ("random-allocation", "fixed", "stream", "poisson"):
        plan = make_plan(users=568, rounds=8, delta=DELTA, epsilon=4.0, partition=partition)
        stated, below = risk([plan.mechanism], DELTA).best_guess, 0
        for _ in range(count):
            found = audit_plan(plan, secrets.token_bytes(32), state=False)
            wrong = found.guesses - found.right
            below += float(beta.ppf(1 - CONFIDENCE, found.right, wrong + 1)) <= stated
        name = f"risk: audits whose best guess is at most the stated one: {partition}"
        rows.append(at_least(name, below, f"of {count}", 95))
    return rows


def prompt_audits() -> list[Result]:
    """Return how near audits on a language model come to ε, beside those in gradient space."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        policy = {
            "model_name_or_path": small_model(Path(place) / "model", 1500), "dtype": "float32",
            "adapter": {"type": "lora", "rank": 8, "target_modules": "all-linear"},
        }  # fmt: skip
        for name, given in AUDITED.items():
            recipe = make_recipe({
                "policy": policy, "data": {"path": "unread"}, "rewards": [{"function": "unread"}],
                "rollout": {"responses": 8}, "rounds": 8, "privacy": {"epsilon": 4.0, **given},
            })  # fmt: skip
            for space in ("prompt", "gradient"):
                folder = Path(place) / name / space
                found = audit(recipe, folder, canaries=CANARIES, space=space, quiet=True)
                unit, start = f"1, {CANARIES:,} canaries", f"risk: audit in {space} space, {name}: "
                share = found.bound / found.epsilon
                rows.append(Result(f"{start}lower bound over epsilon", share, unit))
                if space == "prompt":
                    alone = found.bound_any / found.epsilon
                    rows.append(Result(f"{start}the same from the policy alone", alone, unit))
    return rows


def erased() -> list[Result]:
    """Return what tells a run whose users were erased from one in which they were blank."""

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["round"] == 2:
            raise KeyboardInterrupt

    def files(run: Path) -> dict[str, int]:
        places = [p for p in run.rglob("*") if p.is_file() and "secret" not in p.parts]
        return {str(p.relative_to(run)): p.stat().st_size for p in places}

    plan = make_plan(users=240, rounds=4, delta=DELTA, epsilon=4.0)
    last = open_private(allocate(plan, KEY)).round(4)[:30]
    gone = {f"person {user}" for user in last.tolist()}
    rows = [{"prompt": f"{i} asks", "who": f"person {i}"} for i in range(240)]
    blank = [{**row, "prompt": None} if row["who"] in gone else row for row in rows]
    runs: dict[str, dict[str, int]] = {}
    fix_randomness()
    with tempfile.TemporaryDirectory() as place:
        model = str(tiny.save(Path(place) / "model"))
        # Names of one length: they stand in the files.
        for name, given in (("erased", rows), ("blanks", blank), ("whole_", rows)):
            # One path: the noise follows from the ledger's terms, which name the data.
            path, run = Path(place) / "rows.jsonl", Path(place) / name / "run"
            path.write_text("".join(json.dumps(row) + "\n" for row in given))
            with contextlib.suppress(KeyboardInterrupt):
                dprlhf.train(
                    model=model, reward=vowels, epsilon=4.0, rounds=4, quiet=True,
                    data__path=str(path), data__user_column="who", output_dir=run,
                    callbacks=[stop],
                )  # fmt: skip
            if name == "erased":
                before = files(run)
                erase(run, sorted(gone))
                touched = sum(before.get(n) != size for n, size in files(run).items())
            dprlhf.resume(run, reward=vowels, quiet=True)
            runs[name] = files(run)
        weights = [
            load_file(Path(place) / n / "run/policy/adapter_model.safetensors") for n in runs
        ]
    same = [
        all(torch.equal(weights[0][name], other[name]) for name in weights[0])
        for other in weights[1:]
    ]
    kinds = set(runs["erased"]) ^ set(runs["whole_"])
    sizes = [n for n, size in runs["blanks"].items() if runs["erased"].get(n) != size]
    start = f"risk: {len(gone)} of 240 users, of the last round, erased after 2 of 4: "
    return [
        Result(f"{start}weights equal those of a run in which they were blank", float(same[0]),
               "1 is yes", "1", same[0] and not same[1]),
        *(
            Result(f"{start}files outside secret/ {what}", count, "files", "0", count == 0)
            for what, count in (
                ("that the command changed", touched),
                ("that it adds or lacks", len(kinds)),
                ("of another size than in that run", len(sizes)),
            )
        ),
    ]  # fmt: skip


def vowels(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Score a completion by its share of vowels."""
    return [sum(x in "aeiou" for x in text) / max(len(text), 1) for text in completions]


def compare_all() -> list[Result]:
    """Compare all plans, several kinds at a time."""
    seconds: list[float] = []
    with multiprocessing.Pool(2) as pool:
        for found, took in pool.imap_unordered(compare, COUNTS, chunksize=1):
            write_results(OUT, found, show=True)
            seconds += took
    return [
        *library(plans("poisson", COUNTS["poisson"])[:10]),
        Result("risk: CPU seconds for a plan, median", float(np.median(seconds)), "s"),
        at_most("risk: CPU seconds for a plan, longest", max(seconds), "s", 4),
    ]


def main() -> None:
    """Measure the parts that are named, all by default, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {
        "seconds": time_plans, "audits": audited, "plans": compare_all,
        "prompts": prompt_audits, "erase": erased,
    }  # fmt: skip
    parser.add_argument("parts", nargs="*", choices=[*parts, []])
    given = parser.parse_args()
    for name, measure in parts.items():
        if not given.parts or name in given.parts:
            write_results(OUT, measure(), show=True)


if __name__ == "__main__":
    main()
