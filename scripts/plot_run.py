"""Draw a run: the noised reward on private prompts by round, and the public reward around it.

python scripts/plot_run.py runs/DIR docs/images/imdb.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    card = json.loads((options.run / "privacy.json").read_text())
    lines = (options.run / "metrics.jsonl").read_text().splitlines()
    metrics = [m for m in map(json.loads, lines) if m["private_reward_noised"] is not None]
    rounds = np.array([m["round"] for m in metrics])
    reward = np.array([m["private_reward_noised"] for m in metrics])
    noise = np.array([m["private_reward_noise_std"] for m in metrics])
    samples = json.loads((options.run / "samples.json").read_text())
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 3.4), width_ratios=[3, 2], sharey=True, layout="constrained"
    )
    left.fill_between(rounds, reward - 2 * noise, reward + 2 * noise, alpha=0.2, lw=0)
    left.plot(rounds, reward, marker="o", ms=3, label="private prompts, as released (±2σ of noise)")
    left.set_xlabel("round")
    left.set_ylabel("reward (sentiment logit)")
    left.legend(frameon=False, loc="lower right")
    for x, key in enumerate(("reward_before", "reward_after")):
        values = np.array([s[key] for s in samples])
        right.violinplot(values, positions=[x], showextrema=False, widths=0.8)
        error = 2 * values.std(ddof=1) / np.sqrt(len(values))
        right.errorbar(x, values.mean(), yerr=error, fmt="o", color="black", capsize=4)
    right.set_xticks([0, 1], ["before", "after"])
    right.set_title(f"{len(samples)} held-out public prompts", fontsize=10)
    figure.suptitle(
        f"ε = {card['epsilon']:.3g}, δ = {card['delta']:.0e}, {card['users']:,} users,"
        f" {card['rounds']} rounds, each user once"
    )
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=130)


if __name__ == "__main__":
    main()
