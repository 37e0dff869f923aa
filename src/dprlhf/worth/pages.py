"""A comparison as results on file, as a Markdown table and as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dprlhf.runs.measurements import Result, write_results
from dprlhf.worth.comparison import Comparison, in_words, label, results
from dprlhf.worth.statistics import Values, agreement, break_even, equal_kl, share, standard_error


def write_all(found: Sequence[Comparison], out: Path, command: str) -> str:
    """Write results, tables and plots of all comparisons; return the tables.

    Args:
        found: The comparisons.
        out: Folder of ``results/``, for figures and tables, and ``images/``, for plots.
        command: How to measure it again.
    """
    (out / "images").mkdir(parents=True, exist_ok=True)
    texts = []
    for one in found:
        rows = [Result(**{**asdict(row), "command": command}) for row in results(one)]
        write_results(out / "results" / "worth.json", rows)
        text = "\n".join(table(one, command)) + "\n"
        name = f"worth-{one.task}-{one.model.replace('/', '-')}"
        (out / "results" / f"{name}.md").write_text(text, encoding="utf-8")
        plot(one, out / "images" / f"{name}.png")
        texts.append(text)
    return "\n".join(texts)


def table(found: Comparison, command: str) -> Iterator[str]:
    """Yield the lines of a comparison's page."""
    levels = found.levels
    yield f"# {found.about.title} ({found.model}, {found.users:,} users)"
    yield f"\n`{command}`\n"
    yield (
        "Gain of the mean reward on held-out public prompts, mean over paired seeds"
        f" ({found.seeds}) ± standard error. Price: what the non-private run gains more."
        " Value: what the best public alternative gains less, by the number of public prompts of"
        " the users' kind.\n"
    )
    heads = ["", "gain", "worst seed", "share kept", "price", *(f"value, {n}" for n in levels)]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for epsilon, gains in [*found.private.items(), (math.inf, found.plain)]:
        entries = [label(epsilon), _pair(gains), f"{np.min(gains):+.3f}"]
        entries += [_share(found, gains), _pair(found.plain - gains)]
        entries += [_pair(gains - found.public_only(n)[1]) for n in levels]
        yield "| " + " | ".join(entries) + " |"
    for name, gains in found.public.items():
        entries = [f"public: {name}", _pair(gains), f"{np.min(gains):+.3f}"]
        yield "| " + " | ".join([*entries, *[""] * (len(heads) - 3)]) + " |"
    yield ""
    if not found.is_learned:
        yield "- No share is stated: that the non-private run learns is not certain here."
    for level in levels:
        even = in_words(break_even(found.values(level)), list(found.private))
        best = found.public_only(level)[0]
        yield f"- Break-even ε against {level} public prompts of the users' kind ({best}): {even}."
    reach, gains_there = equal_kl(found.curves)
    if reach > 0:
        there = ", ".join(f"{name} {np.mean(gains):+.3f}" for name, gains in gains_there.items())
        yield f"- Gain at equal √KL = {reach:.2f}: {there}."
    for judge, gains_by in found.judges.items():
        signs, ranks = agreement(found.by_name, gains_by)
        seen = ", ".join(f"{name} {np.mean(gains):+.3f}" for name, gains in gains_by.items())
        agrees = f"{signs:.0%} of the signs, rank correlation {ranks:.2f}"
        yield f"- The judge {judge}, which no run was trained on ({agrees}): {seen}."


def _share(found: Comparison, gains: Values) -> str:
    if not found.is_learned:
        return ""
    kept = share(gains, found.plain)
    interval = "" if math.isnan(kept.low) else f" ({kept.low:.0%} to {kept.high:.0%})"
    return f"{kept.value:.0%}{interval}"


def _pair(values: Values) -> str:
    error = standard_error(values)
    return f"{np.mean(values):+.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def plot(found: Comparison, picture: Path) -> None:
    """Draw gain against ε, with and without public prompts, and gain against √KL."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    epsilons = list(found.private)
    errors = [np.nan_to_num(standard_error(g)) for g in found.private.values()]
    means = [float(np.mean(g)) for g in found.private.values()]
    left.errorbar(epsilons, means, errors, marker="o", ms=3, capsize=2, label="private users")
    _level(left, found.plain, "no privacy", "k", "--")
    for place, level in enumerate(found.levels):
        name, gains = found.public_only(level)
        about = f"public-only, {level} of the users' kind ({name})"
        _level(left, gains, about, f"C{place + 1}", ":")
    left.set_xscale("log")
    left.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    left.minorticks_off()
    left.set_xlabel("ε")
    left.set_ylabel("gain of the reward")
    for place, (name, curves) in enumerate(found.curves.items()):
        points = [np.array([(0.0, 0.0), *curve]) for curve in curves]
        for number, way in enumerate(points):
            shown: dict[str, Any] = {"label": name} if number == 0 else {}
            right.plot(way[:, 0], way[:, 1], ".-", lw=0.8, ms=3, color=f"C{place}", **shown)
    right.set_xlabel("√KL to the base model (√nats)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    figure.suptitle(f"{found.about.title}: {found.model}, {found.users:,} users", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _level(axis: Any, gains: Values, name: str, color: str, style: str) -> None:
    mean, error = float(np.mean(gains)), float(np.nan_to_num(standard_error(gains)))
    axis.axhline(mean, color=color, ls=style, lw=1, label=name)
    axis.axhspan(mean - error, mean + error, color=color, alpha=0.1, lw=0)
