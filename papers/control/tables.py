"""The rows of the papers' tables: what is run, beside the figures that the papers print."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.privacy.plan import json_ready

RIVERSWIM_EPISODES = 20_000
BANDIT_USERS = (500, 1_500, 5_000, 15_000, 50_000)
ISSP_USERS = (20_000, 50_000, 100_000, 200_000)
BANDIT_EPSILONS = (0.5, 1.0, 4.0, math.inf)
BANDIT_DIMENSION = 4
BANDIT_UPDATES = (
    "pg",
    "npg/sufficient-statistics",
    "npg/issp",
    "npg/improper-batch-sgd",
    "npg/projected-sgd",
    "npg/exponential",
    "rebel",
    "tabular-pg",
)


@dataclass(frozen=True)
class TableRow:
    """One line of a table."""

    name: str  # Unique name, task/algorithm/privacy
    kind: Literal["train", "regret", "ucbvi", "bandit"]
    settings: Mapping[str, Any]  # The recipe's file and overrides, or the arguments of kind
    paper: str = ""  # The paper's figure, as printed, with the privacy that it claims
    goal: float | None = None  # The least value that is asked for; None without a goal
    note: str = ""
    group: str = ""

    def digest(self, seed: int, recipes: Path) -> str:
        """Return a digest of what one seed runs, which changes with the recipe's settings."""
        base: Any = None
        if "recipe" in self.settings:
            path = recipes / self.settings["recipe"]
            base = yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
        text = json.dumps([self.kind, base, json_ready(self.settings), seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _train(
    recipe: str, name: str, paper: str, goal: float | None, note: str, **changes: Any
) -> TableRow:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    settings["recipe"] = f"{recipe}.yaml"
    return TableRow(name, "train", settings, paper, goal, note, name.split("/")[0])


HZ_CLAIMED = {
    ("pg", 5.0): "190.3 ± 52.9 (claimed ε = 5)",
    ("pg", 3.0): "143.9 ± 22.9 (claimed ε = 3)",
    ("pg", math.inf): "334.4 ± 25.3",
    ("npg", 5.0): "478.7 ± 28.1 (claimed ε = 5)",
    ("npg", 3.0): "400.9 ± 65.4 (claimed ε = 3)",
    ("npg", math.inf): "492.9 ± 10.0",
}
"""He & Zhou's table 1 as printed, by update and the ε that they claim."""


def hz() -> list[TableRow]:
    """He & Zhou, table 1 (CartPole, 1,000 users), and the sample complexity of their theorems."""
    rows = []
    goals = {("pg", 3.0): 300.0, ("npg", 3.0): 490.0, ("npg", 1.0): 450.0}
    epsilons = (1.0, 3.0, 5.0, math.inf)
    for policy, suffix, note in (
        ("log-linear", "", "log-linear policy"),
        ("mlp", "_mlp", "the paper's network, d = 450"),
    ):
        rows += [
            _train(
                f"cartpole_{update}{suffix}",
                f"cartpole/{update}/{policy}/epsilon={epsilon:g}",
                HZ_CLAIMED.get((update, epsilon), ""),
                None if suffix else goals.get((update, epsilon)),
                note,
                privacy__epsilon=epsilon,
            )
            for update in ("pg", "npg")
            for epsilon in epsilons
        ]
    forms = {
        "public": "the paper's setting (100 fixed batches of 10) with public advantages",
        "batch": "not private: batch-normalised advantages, as in the paper",
    }
    rows += [
        _train(
            "cartpole_paper",
            f"cartpole/pg/paper-setting/{baseline}",
            HZ_CLAIMED["pg", 3.0],
            None,
            note,
            update__advantage__baseline=baseline,
            privacy__epsilon=3.0,
        )
        for baseline, note in forms.items()
    ]
    rows += [
        TableRow(
            f"bandit/{update}/epsilon={epsilon:g}/users={users}",
            "bandit",
            {"update": update, "epsilon": epsilon, "users": users, "d": BANDIT_DIMENSION},
            group="bandit",
        )
        for update in BANDIT_UPDATES
        for epsilon in BANDIT_EPSILONS
        for users in (ISSP_USERS if update == "npg/issp" else BANDIT_USERS)
    ]
    return rows


def rio() -> list[TableRow]:
    """Rio et al., table 1 and figures 2 and 6: control, dosing and MuJoCo."""
    rows = []
    # What the paper's z really costs: one Gaussian, zero-out, δ = 1e-5.
    spent = {z: round(gaussian_epsilon(z, 1e-5), 4) for z in (1.0, 3.0)}
    control = {
        ("cartpole", 1.0): (496.4, "496.4 ± 6.6 (z = 1)"),
        ("cartpole", 3.0): (375.5, "375.5 ± 86.7 (z = 3)"),
        ("acrobot", 1.0): (-83.0, "−83.0 ± 4.4 (z = 1)"),
        ("acrobot", 3.0): (-89.8, "−89.8 ± 7.6 (z = 3)"),
    }
    for (task, z), (goal, paper) in control.items():
        note = f"ε of one Gaussian with z = {z:g}"
        rows.append(
            _train(
                f"{task}_rio", f"{task}/rio/z={z:g}", paper, goal, note, privacy__epsilon=spent[z]
            )
        )
        forms = {
            "public": "DP-PG with public advantages",
            "critic": "not private: the same with an un-noised critic, as in the paper",
        }
        rows += [
            _train(
                f"{task}_pg",
                f"{task}/rio-{baseline}/z={z:g}",
                paper,
                None,
                form,
                privacy__epsilon=spent[z],
                update__advantage__baseline=baseline,
            )
            for baseline, form in forms.items()
        ]
    rows += [
        _train(
            f"{task}_rio", f"{task}/curve/epsilon={epsilon:g}", "", None, "",
            privacy__epsilon=epsilon,
        )
        for task in ("cartpole", "acrobot")
        for epsilon in (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
    ]  # fmt: skip
    dosing = {
        0: (109.9, "109.9 ± 4.8 (z = 0.1, ε = 91.8)"),
        1: (20.7, "20.7 ± 53.4 (z = 0.1, ε = 91.8)"),
    }
    rows += [
        _train(
            f"dosing{number}",
            f"dosing-{number}/pgpe/epsilon={epsilon:g}",
            paper,
            goal if epsilon == 8 else None,
            "linear policy",
            privacy__epsilon=epsilon,
        )
        for number, (goal, paper) in dosing.items()
        for epsilon in (1.0, 8.0, math.inf)
    ]
    mujoco = {
        "halfcheetah": (1548.9, "1548.9 ± 399.1 (z = 0.05, ε = 284)", "a clock"),
        "hopper": (645.0, "645.0 ± 176.4 (z = 0.05, ε = 284)", "its trunk"),
    }
    untrained = {"users": 1, "rounds": 1, "optimizer__learning_rate": 1e-9}
    for task, (goal, paper, seen) in mujoco.items():
        note = f"positions of the joints, linear in {seen}"
        rows.append(
            _train(task, f"{task}/pgpe/epsilon=10", paper, goal, note, privacy__epsilon=10.0)
        )
        note = "this class of policies before it has learned anything"
        rows.append(
            _train(
                task, f"{task}/untrained", "", None, note, privacy__epsilon=math.inf, **untrained
            )
        )
    return rows


def riverswim() -> list[TableRow]:
    """Rio et al., figures 1 and 5: cumulative regret of the stream mode and of UCB-VI."""
    rows = []
    for p, epsilon in itertools.product((0.6, 0.9), (1.0, 5.0)):
        group = f"riverswim-{p:g}"
        environments = {"blind": f"{group}-blind", "tabular": group}
        rows += [
            TableRow(
                f"{group}/pgpe-{policy}/epsilon={epsilon:g}",
                "regret",
                {
                    "recipe": f"riverswim_{policy}.yaml",
                    "privacy.epsilon": epsilon,
                    "environment": environment,
                    "users": RIVERSWIM_EPISODES,
                },
                note="stream, joint DP",
                group=group,
            )
            for policy, environment in environments.items()
        ]
        rows += [
            TableRow(
                f"{group}/ucb-vi-{mechanism}/bonus={bonus:g}/epsilon={epsilon:g}",
                "ucbvi",
                {
                    "p": p,
                    "epsilon": epsilon,
                    "mechanism": mechanism,
                    "bonus": bonus,
                    "episodes": RIVERSWIM_EPISODES,
                },
                note="joint DP",
                group=group,
            )
            for mechanism in ("laplace", "gaussian")
            for bonus in (1.0, 0.1, 0.01)
        ]
    return rows


TABLES = {"hz": hz, "rio": rio, "riverswim": riverswim}
