"""The rows of the papers' tables, with the figures that the papers print; how they are run."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml

from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.privacy.plan import json_ready
from dprlhf.runs.measurements import run_missing
from papers.control import bandits
from papers.control.environments import Riverswim, make_environment
from papers.control.policies import Array, softmax
from papers.control.train import ControlOutcome, load, train
from papers.control.ucbvi import Counting, ucbvi
from papers.control.updates import PGPE

RIVERSWIM_EPISODES = 20_000
BANDIT_USERS = (500, 1_500, 5_000, 15_000, 50_000)
ISSP_USERS = (20_000, 50_000, 100_000, 200_000)
BANDIT_EPSILONS = (0.5, 1.0, 4.0, math.inf)


@dataclass
class TableRow:
    name: str  # Unique name, task/algorithm/privacy
    kind: Literal["train", "regret", "ucbvi", "bandit"]
    settings: Mapping[str, Any]  # The recipe's file and overrides, or the arguments of kind
    note: str = ""
    paper: str = ""  # The paper's figure, as printed, with the privacy that it claims
    goal: float | None = None  # The least value that is asked for; None without a goal
    runs: list[dict[str, Any]] = field(default_factory=list)  # The results of its seeds

    @property
    def group(self) -> str:
        return self.name.split("/")[0]

    @property
    def values(self) -> Array:
        """The value of each seed, ``[seeds]``."""
        return np.array([run["value"] for run in self.runs], dtype=np.float64)

    def digest(self, seed: int, recipes: Path) -> str:
        """Return a digest of what one seed runs, which changes with the recipe's settings."""
        base: Any = None
        if "recipe" in self.settings:
            path = recipes / self.settings["recipe"]
            base = yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
        text = json.dumps([self.kind, base, json_ready(self.settings), seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _train(
    recipe: str, name: str, note: str, paper: str = "", goal: float | None = None, **changes: Any
) -> TableRow:
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return TableRow(name, "train", {**settings, "recipe": f"{recipe}.yaml"}, note, paper, goal)


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
    goals = {("pg", 3.0): 300.0, ("npg", 3.0): 490.0, ("npg", 1.0): 450.0}
    policies = {
        "log-linear": ("", "log-linear policy"),
        "mlp": ("_mlp", "the paper's network, d = 450"),
    }
    forms = {
        "public": "the paper's setting (100 fixed batches of 10) with public advantages",
        "batch": "not private: batch-normalised advantages, as in the paper",
    }
    rows = [
        _train(
            f"cartpole_{update}{suffix}", f"cartpole/{update}/{policy}/epsilon={epsilon:g}", note,
            HZ_CLAIMED.get((update, epsilon), ""), None if suffix else goals.get((update, epsilon)),
            privacy__epsilon=epsilon,
        )
        for policy, (suffix, note) in policies.items()
        for update in ("pg", "npg")
        for epsilon in (1.0, 3.0, 5.0, math.inf)
    ]  # fmt: skip
    rows += [
        _train(
            "cartpole_paper", f"cartpole/pg/paper-setting/{baseline}", note, HZ_CLAIMED["pg", 3.0],
            update__advantage__baseline=baseline, privacy__epsilon=3.0,
        )
        for baseline, note in forms.items()
    ]  # fmt: skip
    rows += [
        TableRow(
            f"bandit/{update}/epsilon={epsilon:g}/users={users}", "bandit",
            {"update": update, "epsilon": epsilon, "users": users, "d": 4},
        )
        for update in bandits.RATES
        for epsilon in BANDIT_EPSILONS
        for users in (ISSP_USERS if update == "npg/issp" else BANDIT_USERS)
    ]  # fmt: skip
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
    forms = {
        "public": "DP-PG with public advantages",
        "critic": "not private: the same with an un-noised critic, as in the paper",
    }
    for (task, z), (goal, paper) in control.items():
        note, name = f"ε of one Gaussian with z = {z:g}", f"{task}/rio/z={z:g}"
        rows.append(_train(f"{task}_rio", name, note, paper, goal, privacy__epsilon=spent[z]))
        rows += [
            _train(
                f"{task}_pg", f"{task}/rio-{baseline}/z={z:g}", note, paper,
                privacy__epsilon=spent[z], update__advantage__baseline=baseline,
            )
            for baseline, note in forms.items()
        ]  # fmt: skip
    rows += [
        _train(f"{task}_rio", f"{task}/curve/epsilon={epsilon:g}", "", privacy__epsilon=epsilon)
        for task in ("cartpole", "acrobot")
        for epsilon in (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
    ]
    dosing = {
        0: (109.9, "109.9 ± 4.8 (z = 0.1, ε = 91.8)"),
        1: (20.7, "20.7 ± 53.4 (z = 0.1, ε = 91.8)"),
    }
    rows += [
        _train(
            f"dosing{number}", f"dosing-{number}/pgpe/epsilon={epsilon:g}", "linear policy", paper,
            goal if epsilon == 8 else None, privacy__epsilon=epsilon,
        )
        for number, (goal, paper) in dosing.items()
        for epsilon in (1.0, 8.0, math.inf)
    ]  # fmt: skip
    mujoco = {
        "halfcheetah": (1548.9, "1548.9 ± 399.1 (z = 0.05, ε = 284)", "a clock"),
        "hopper": (645.0, "645.0 ± 176.4 (z = 0.05, ε = 284)", "its trunk"),
    }
    untrained: dict[str, Any] = {"users": 1, "rounds": 1, "optimizer__learning_rate": 1e-9}
    for task, (goal, paper, seen) in mujoco.items():
        note = f"positions of the joints, linear in {seen}"
        rows.append(
            _train(task, f"{task}/pgpe/epsilon=10", note, paper, goal, privacy__epsilon=10.0)
        )
        note = "this class of policies before it has learned anything"
        rows.append(_train(task, f"{task}/untrained", note, privacy__epsilon=math.inf, **untrained))
    return rows


def riverswim() -> list[TableRow]:
    """Rio et al., figures 1 and 5: cumulative regret of the stream mode and of UCB-VI."""
    rows = []
    for p, epsilon in itertools.product((0.6, 0.9), (1.0, 5.0)):
        group = f"riverswim-{p:g}"
        for policy, environment in (("blind", f"{group}-blind"), ("tabular", group)):
            settings = {
                "recipe": f"riverswim_{policy}.yaml", "privacy.epsilon": epsilon,
                "environment": environment, "users": RIVERSWIM_EPISODES,
            }  # fmt: skip
            name = f"{group}/pgpe-{policy}/epsilon={epsilon:g}"
            rows.append(TableRow(name, "regret", settings, "stream, joint DP"))
        for mechanism, bonus in itertools.product(("laplace", "gaussian"), (1.0, 0.1, 0.01)):
            settings = {
                "p": p, "epsilon": epsilon, "mechanism": mechanism, "bonus": bonus,
                "episodes": RIVERSWIM_EPISODES,
            }  # fmt: skip
            name = f"{group}/ucb-vi-{mechanism}/bonus={bonus:g}/epsilon={epsilon:g}"
            rows.append(TableRow(name, "ucbvi", settings, "joint DP"))
    return rows


TABLES = {"hz": hz, "rio": rio, "riverswim": riverswim}


def run_table(
    table: str, *, seeds: int, recipes: Path, cache: Path, jobs: int = 1, only: str = "",
    changes: Mapping[str, Any] | None = None, write_only: bool = False, quiet: bool = False,
) -> list[TableRow]:  # fmt: skip
    """Run what is missing of a table, in parallel processes; return what is finished of it."""
    rows = [row for row in TABLES[table]() if only in row.name]
    for row in rows:
        row.settings = {**row.settings, **(changes or {})}
    work = {
        cache / f"{row.name.replace('/', '_')}-{seed}-{row.digest(seed, recipes)}.json": (row, seed)
        for row in rows
        for seed in range(1 if row.kind == "ucbvi" else seeds)
    }
    done = run_missing(
        run_one, {file: (*given, recipes, seeds) for file, given in work.items()},
        side_by_side=jobs, write_only=write_only, label=table, quiet=quiet,
    )  # fmt: skip
    for file, content in done.items():
        work[file][0].runs += content if isinstance(content, list) else [content]
    return [row for row in rows if row.runs]


def run_one(row: TableRow, seed: int, recipes: Path, seeds: int) -> Any:
    """Run one seed of a row and return its result; of UCB-VI all seeds, and a list."""
    torch.set_num_threads(1)
    given = row.settings
    if row.kind == "bandit":
        value = bandits.run(given["update"], given["d"], given["users"], given["epsilon"], seed)
        return {"value": value, "epsilon": json_ready(given["epsilon"])}
    if row.kind == "ucbvi":
        counting = Counting(given["epsilon"], mechanism=given["mechanism"])
        regrets = ucbvi(
            Riverswim(given["p"]), given["episodes"], counting, bonus=given["bonus"], seed=seed,
            runs=seeds, every=10,
        ).cumsum(1)[:, -1]  # fmt: skip
        delta = 0.0 if given["mechanism"] == "laplace" else counting.delta
        shared = {"epsilon": given["epsilon"], "delta": delta, "adjacency": "zero-out"}
        return [{"value": float(r), **shared, "partition": "stream"} for r in regrets]
    changes = dict(given)
    recipe = load(recipes / changes.pop("recipe"), changes)
    # Reproducible, and no secret, for the users of a simulated run are nobody.
    key = hashlib.sha256(f"{row.name} {seed}".encode()).digest()
    if row.kind == "train":
        outcome = train(recipe, key=key, seed=seed)
        return _result(outcome, float(outcome.returns.mean()))
    environment, update = make_environment(recipe.environment), recipe.update
    assert isinstance(environment, Riverswim)
    assert isinstance(update, PGPE)
    rng = np.random.default_rng((seed, 4))
    losses: list[float] = []

    def watch(t: int, theta: Array) -> None:
        # What a user loses in expectation, over fresh draws of its perturbation.
        draws = [update.draw(rng, len(theta)) for _ in range(4)]
        acting = np.concatenate([theta + sign * d for d in draws for sign in (-1, 1)])
        values = [environment.value(softmax(one.reshape(2, -1).T)) for one in acting]
        losses.append(environment.best - float(np.mean(values)))

    outcome = train(recipe, key=key, seed=seed, watch=watch)
    return _result(outcome, float(sum(losses) * outcome.plan.expected_batch_size))


def _result(outcome: ControlOutcome, value: float) -> dict[str, Any]:
    plan = outcome.plan
    return {
        "value": value, "epsilon": plan.terms()["epsilon"], "delta": plan.guarantee.delta,
        "adjacency": plan.adjacency, "partition": plan.partition,
        "noise_multiplier": plan.noise_multiplier, "dimension": len(outcome.theta),
    }  # fmt: skip
