"""Runs the rows of the papers' tables, in parallel processes; a second call does the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dprlhf.privacy.plan import json_ready
from dprlhf.runs.many import run_missing
from papers.control import bandits
from papers.control.environments import Riverswim, make_environment
from papers.control.policies import softmax
from papers.control.settings import PGPE, load
from papers.control.tables import TABLES, TableRow
from papers.control.train import ControlOutcome, train
from papers.control.ucbvi import Counting, ucbvi


@dataclass
class MeasuredRow:
    """A row with the results of its seeds."""

    row: TableRow
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def values(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The value of each seed, ``[seeds]``."""
        return np.array([run["value"] for run in self.runs], dtype=np.float64)


def run_table(
    table: str,
    *,
    seeds: int = 10,
    jobs: int = 1,
    recipes: Path = Path("recipes/control"),
    cache: Path = Path("runs/control"),
    only: str = "",
    changes: Mapping[str, Any] | None = None,
    write_only: bool = False,
    quiet: bool = False,
) -> list[MeasuredRow]:
    """Run what is missing of a table and return what is finished of it."""
    rows = [row for row in TABLES[table]() if only in row.name]
    if changes:
        rows = [TableRow(**asdict(row) | {"settings": {**row.settings, **changes}}) for row in rows]
    work = {
        cache / f"{row.name.replace('/', '_')}-{seed}-{row.digest(seed, recipes)}.json": (row, seed)
        for row in rows
        for seed in range(1 if row.kind == "ucbvi" else seeds)
    }
    done = run_missing(
        run_one,
        {file: (asdict(row), seed, str(recipes), seeds) for file, (row, seed) in work.items()},
        side_by_side=jobs, write_only=write_only, label=table, quiet=quiet,
    )  # fmt: skip
    measured = {row.name: MeasuredRow(row) for row in rows}
    for file, content in done.items():
        measured[work[file][0].name].runs += content if isinstance(content, list) else [content]
    return [row for row in measured.values() if row.runs]


def run_one(settings: dict[str, Any], seed: int, recipes: str, seeds: int) -> Any:
    """Run one seed of a row and return its result."""
    torch.set_num_threads(1)
    row = TableRow(**settings)
    given = row.settings
    if row.kind == "ucbvi":
        counting = Counting(given["epsilon"], mechanism=given["mechanism"])
        regrets = ucbvi(
            Riverswim(given["p"]), given["episodes"], counting, bonus=given["bonus"], seed=seed,
            runs=seeds, every=10,
        ).cumsum(1)  # fmt: skip
        return [
            {
                "value": float(line[-1]),
                "epsilon": given["epsilon"],
                "delta": 0.0 if given["mechanism"] == "laplace" else counting.delta,
                "adjacency": "zero-out",
                "partition": "stream",
            }
            for line in regrets
        ]
    if row.kind == "bandit":
        value = bandits.run(given["update"], given["d"], given["users"], given["epsilon"], seed)
        return {"value": value, "epsilon": json_ready(given["epsilon"])}
    changes = dict(given)
    recipe = load(Path(recipes) / changes.pop("recipe"), changes)
    # Reproducible, and no secret, for the users of a simulated run are nobody.
    key = hashlib.sha256(f"{row.name} {seed}".encode()).digest()
    if row.kind == "regret":
        environment = make_environment(recipe.environment)
        assert isinstance(environment, Riverswim)
        rng = np.random.default_rng((seed, 4))
        update = recipe.update
        losses: list[float] = []

        def watch(t: int, theta: Any) -> None:
            # What a user loses in expectation, over fresh draws of its perturbation.
            acting = theta[None]
            if isinstance(update, PGPE):
                draws = [update.draw(rng, len(theta)) for _ in range(4)]
                acting = np.concatenate([theta + sign * d for d in draws for sign in (-1, 1)])
            chances = [softmax(row.reshape(2, -1).T) for row in acting]
            shape = (environment.states, 2)
            values = [environment.value(np.broadcast_to(chance, shape)) for chance in chances]
            losses.append(environment.best - float(np.mean(values)))

        outcome = train(recipe, key=key, seed=seed, watch=watch)
        regret = sum(losses) * outcome.plan.expected_batch_size
        return _result(outcome, float(regret))
    outcome = train(recipe, key=key, seed=seed)
    return _result(outcome, float(outcome.returns.mean()))


def _result(outcome: ControlOutcome, value: float) -> dict[str, Any]:
    plan = outcome.plan
    return {
        "value": value,
        "epsilon": plan.terms()["epsilon"],
        "delta": plan.guarantee.delta,
        "adjacency": plan.adjacency,
        "partition": plan.partition,
        "noise_multiplier": plan.noise_multiplier,
        "dimension": len(outcome.theta),
    }
