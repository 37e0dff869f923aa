"""Runs the rows of the papers' tables, in parallel processes that can be resumed.

Every finished (row, seed) is a JSON file under ``runs/``, named by a digest of what was run; a
second call does what is missing. :mod:`dprlhf.papers.control.results` writes results, tables and
plots.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dprlhf.errors import DprlhfError
from dprlhf.papers.control.tables import TABLES, Row
from dprlhf.privacy.plan import json_ready
from dprlhf.runs.many import run_missing


@dataclass
class Found:
    """A row with the results of its seeds.

    Attributes:
        row: What was run.
        runs: One result for each seed: its ``value``, and what the row's kind adds.
    """

    row: Row
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
    quiet: bool = False,
) -> list[Found]:
    """Run what is missing of a table and return all of it.

    Args:
        table: A key of :data:`TABLES`.
        seeds: Number of seeds of each row.
        jobs: Number of parallel processes.
        recipes: Folder of the recipes.
        cache: Folder of finished and half-finished runs.
        only: Run rows whose name contains this, and no others.
        changes: Settings that replace those of every row, for runs in miniature.
        quiet: Whether to hide the progress bar.

    Raises:
        DprlhfError: the table or a recipe is unknown, or a recipe cannot run.
    """
    if table not in TABLES:
        raise DprlhfError(f"table '{table}' is unknown: use one of {', '.join(TABLES)}")
    rows = [row for row in TABLES[table]() if only in row.name]
    if not rows:
        raise DprlhfError(f"no row of table {table} has '{only}' in its name")
    if changes:
        rows = [Row(**asdict(row) | {"settings": {**row.settings, **changes}}) for row in rows]
    work = {
        _path(cache, recipes, row, seed): (asdict(row), seed, str(recipes), str(cache), seeds)
        for row in rows
        for seed in range(1 if row.kind == "ucbvi" else seeds)
    }
    run_missing(run_one, work, side_by_side=jobs, label=table, quiet=quiet)
    return [_read(row, seeds, cache, recipes) for row in rows]


def read_table(table: str, seeds: int, cache: Path, recipes: Path) -> list[Found]:
    """Return what is finished of a table; rows with no finished seed are left out."""
    found = [_read(row, seeds, cache, recipes) for row in TABLES[table]()]
    return [f for f in found if f.runs]


def run_one(settings: dict[str, Any], seed: int, recipes: str, cache: str, seeds: int) -> Any:
    """Run one seed of a row and return its result."""
    import torch

    torch.set_num_threads(1)
    row = Row(**settings)
    return _RUN[row.kind](row, seed, Path(recipes), Path(cache), seeds)


def _path(cache: Path, recipes: Path, row: Row, seed: int) -> Path:
    return cache / f"{row.name.replace('/', '_')}-{seed}-{row.digest(seed, recipes)}.json"


def _read(row: Row, seeds: int, cache: Path, recipes: Path) -> Found:
    found = Found(row)
    for seed in range(1 if row.kind == "ucbvi" else seeds):
        path = _path(cache, recipes, row, seed)
        if path.exists():
            content = json.loads(path.read_text("utf-8"))
            found.runs.extend(content if isinstance(content, list) else [content])
    return found


def _recipe(row: Row, recipes: Path) -> Any:
    from dprlhf.papers.control.settings import load

    changes = dict(row.settings)
    return load(recipes / changes.pop("recipe"), changes)


def _key(row: Row, seed: int) -> bytes:
    """Return the key of a simulated run: reproducible, and no secret, for its users are nobody."""
    return hashlib.sha256(f"{row.name} {seed}".encode()).digest()


def _run_train(row: Row, seed: int, recipes: Path, cache: Path, seeds: int) -> dict[str, Any]:
    from dprlhf.papers.control.train import train

    folder = cache / "half-done" / f"{row.digest(seed, recipes)}"
    outcome = train(_recipe(row, recipes), folder, key=_key(row, seed), seed=seed)
    _remove(folder)
    plan = outcome.plan
    return {
        "value": float(outcome.returns.mean()),
        "curve": outcome.curve,
        "epsilon": plan.terms()["epsilon"],
        "delta": plan.guarantee.delta,
        "adjacency": plan.adjacency,
        "partition": plan.partition,
        "accountant": plan.guarantee.accountant,
        "users": plan.users,
        "rounds": plan.rounds,
        "noise_multiplier": plan.noise_multiplier,
        "dimension": len(outcome.theta),
    }


def _run_regret(row: Row, seed: int, recipes: Path, cache: Path, seeds: int) -> dict[str, Any]:
    from dprlhf.papers.control.environments import Riverswim, make_environment
    from dprlhf.papers.control.policies import softmax
    from dprlhf.papers.control.settings import PGPE
    from dprlhf.papers.control.train import train

    recipe = _recipe(row, recipes)
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

    folder = cache / "half-done" / f"{row.digest(seed, recipes)}"
    _remove(folder)  # the watched values are not in the checkpoint: start again
    outcome = train(recipe, folder, key=_key(row, seed), seed=seed, watch=watch)
    _remove(folder)
    m = outcome.plan.expected_batch_size
    regret = np.cumsum(np.array(losses) * m)
    at = m * np.arange(1, len(losses) + 1)
    return {
        "value": float(regret[-1]),
        "curve": [(float(x), float(y)) for x, y in zip(at, regret, strict=True)],
        "epsilon": outcome.plan.terms()["epsilon"],
        "delta": outcome.plan.guarantee.delta,
        "adjacency": outcome.plan.adjacency,
        "partition": outcome.plan.partition,
        "noise_multiplier": outcome.plan.noise_multiplier,
        "dimension": len(outcome.theta),
    }


def _run_ucbvi(row: Row, seed: int, recipes: Path, cache: Path, seeds: int) -> list[dict[str, Any]]:
    from dprlhf.papers.control.environments import Riverswim
    from dprlhf.papers.control.ucbvi import Counting, ucbvi

    given = row.settings
    counting = Counting(given["epsilon"], mechanism=given["mechanism"])
    regret = ucbvi(
        Riverswim(given["p"]), given["episodes"], counting, bonus=given["bonus"], seed=seed,
        runs=seeds, every=given.get("every", 10),
    ).cumsum(1)  # fmt: skip
    at = np.unique(np.linspace(1, regret.shape[1], 101).astype(int)) - 1
    return [
        {
            "value": float(line[-1]),
            "curve": [(float(k + 1), float(line[k])) for k in at],
            "epsilon": given["epsilon"],
            "delta": 0.0 if given["mechanism"] == "laplace" else counting.delta,
            "adjacency": "zero-out",
            "partition": "stream",
        }
        for line in regret
    ]


def _run_bandit(row: Row, seed: int, recipes: Path, cache: Path, seeds: int) -> dict[str, Any]:
    from dprlhf.papers.control.bandits import run

    given = row.settings
    value = run(given["update"], given["d"], given["users"], given["epsilon"], seed)
    return {"value": value, "epsilon": json_ready(given["epsilon"])}


_RUN: dict[str, Any] = {
    "train": _run_train,
    "regret": _run_regret,
    "ucbvi": _run_ucbvi,
    "bandit": _run_bandit,
}


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
