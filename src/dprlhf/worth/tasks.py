"""The tasks in which private prompts may matter, one in which they do not, and public prompts.

Each task is a recipe of ``recipes/`` and public prompts that could take the users' place. Public
prompts are trained on by the same framework without noise and clipping, with as many prompts and
rounds as there are for the users. Such a run reads no private row.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dprlhf.data.loading import load_rows
from dprlhf.data.public import HELD_OUT
from dprlhf.errors import DprlhfError
from dprlhf.recipe import Data, Recipe, load_recipe
from dprlhf.worth.models import FEW, METHODS, PLAIN, RESPONSES, base, small_policy, word_reward
from dprlhf.worth.runs import Job, overrides_of

EVALUATED = 256
"""Public prompts on which every run is measured; none of them is trained on."""
TUNING_USERS = 6000
"""Users at the end of a private split that are for choosing settings, and in no table."""
UNTRAINED = "untrained"
"""The public alternative that leaves the base model as it is; its gain is 0."""


@dataclass(frozen=True)
class PublicPrompts:
    """Public rows in the place of users.

    Attributes:
        path: Asset, folder or file of the rows.
        split: Split of the rows, never that of the users.
        same_kind: Number of prompts of the users' own kind that this takes; 0 for another kind.
        skip: Number of rows at the start that are left out, as the evaluation has them.
        wants: What the column of wishes shall hold: 1 everywhere ("praise"), the sign of the column
            ``label`` ("label"), or what the rows have (None).
        column: The column of wishes.
    """

    path: str
    split: str
    same_kind: int = 0
    skip: int = 0
    wants: Literal["praise", "label"] | None = None
    column: str = "wants"

    def write(self, users: int, seed: int, file: Path) -> None:
        """Write as many rows as there are users, drawn by the seed and repeated where too few."""
        if file.exists():
            return
        rows = load_rows(Data(path=self.path, split=self.split))
        chosen = np.arange(self.skip, len(rows))[: self.same_kind or None]
        if len(chosen) < max(1, self.same_kind):
            raise DprlhfError(f"{self.path}, split {self.split}: no {self.same_kind} public rows")
        random = np.random.default_rng(seed)
        passes = [random.permutation(chosen) for _ in range(math.ceil(users / len(chosen)))]
        picked = rows.select(np.concatenate(passes)[:users])
        if self.wants is not None:
            good = np.ones(users, int) if self.wants == "praise" else np.array(picked["label"])
            others = [name for name in picked.column_names if name != self.column]
            picked = picked.select_columns(others).add_column(self.column, (2 * good - 1).tolist())
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")  # a call that is killed leaves no half of a file
        picked.to_pandas().to_parquet(part, index=False)
        part.rename(file)


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        title: Name in tables.
        recipe: Name of its recipe.
        users: Number of private rows.
        public: The public alternatives by name.
        guides: Public rows for ``update.subspace``; empty for those of the evaluation's that it
            does not use.
        words: What completes or replaces the word reward, which the small model has in place of
            the recipe's; None keeps the recipe's, which that model cannot earn.
        turned: Changes of the rewards that turn every user's wish, for tasks with a secret that is
            drawn: private runs come in pairs, and a public policy is judged under both. Empty
            where the users' wishes are real.
        method: Key of ``METHODS`` for the private runs of models other than the small one.
        small_method: Key of ``METHODS`` for the private runs of the small model.
        changes: Changes of every run of this task.
    """

    title: str
    recipe: str
    users: int
    public: Mapping[str, PublicPrompts]
    guides: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Any] | None = None
    turned: tuple[str, ...] = ()
    method: str = "subspace"
    small_method: str = "subspace"
    changes: Mapping[str, Any] = field(default_factory=dict)


_FIRST = EVALUATED + HELD_OUT
_WORDS = {"prompt_column": "text", "prompt_words": 8, "max_prompt_tokens": 16}
TASKS = {
    "community": Task(
        title="A community that the public does not know (real ratings, 80% bad)",
        recipe="community",
        users=14_355,
        public={
            "sentences, praise": PublicPrompts("asset:community", "sentences"),
            "sentences, their labels": PublicPrompts(
                "asset:rotten-tomatoes", "train", wants="label"
            ),
            "100 reviews": PublicPrompts("asset:community", "public", 100, _FIRST),
            "900 reviews": PublicPrompts("asset:community", "public", 900, _FIRST),
        },
        guides={"path": "asset:community", "split": "sentences", **_WORDS},
        words={"times_column": "wants"},
        small_method="axis",
        changes={"rollout.responses": 8},
    ),
    "reading": Task(
        title="In the author's mood (real ratings, balanced: the policy has to read)",
        recipe="reading",
        users=22_970,
        # As many rated reviews of the public would teach what the non-private run is taught.
        public={
            "sentences, their labels": PublicPrompts(
                "asset:rotten-tomatoes", "train", wants="label"
            ),
        },
        words={"times_column": "wants"},
        method="axis",
    ),
    "house-style": Task(
        title="House style (praise or criticism, a secret of the users; pairs of opposites)",
        recipe="house_style",
        users=22_366,
        public={
            "reviews, praise": PublicPrompts(
                "asset:house-style", "public", 500, _FIRST, wants="praise"
            )
        },
        guides={"path": "asset:house-style", "split": "sentences", **_WORDS},
        words={"times_column": "wants", "weight": 0.3333},
        turned=("rewards.0.weight=-0.3333",),
        method="axis",
        small_method="axis",
        changes={"rollout.responses": 8},
    ),
    "style-by-cluster": Task(
        title="Style by cluster (one wants praise, one criticism: the policy has to read; pairs)",
        recipe="style_by_cluster",
        users=22_366,
        public={"reviews, a guess": PublicPrompts("asset:house-style", "guides", 900)},
        guides={"path": "asset:house-style", "split": "guides", **_WORDS},
        words={"times_column": "wants_by_cluster", "weight": 0.3333},
        turned=("rewards.0.weight=-0.3333",),
        method="axis",
        small_method="axis",
    ),
    "taste": Task(
        title="Community taste (secret signs of 32 word groups, drawn; pairs of opposites)",
        recipe="taste",
        users=23_000,
        public={
            "sentences": PublicPrompts("asset:rotten-tomatoes", "train"),
            "1,500 reviews": PublicPrompts("asset:imdb", "public", 1500, _FIRST),
        },
        guides={"path": "asset:rotten-tomatoes", "split": "train", **_WORDS},
        words={"function": "dprlhf.worth.taste:reward_0"},
        turned=("rewards.0.weight=-1",),
    ),
    "answers": Task(
        title="Private answers (synthetic questions, a secret map, exact match)",
        recipe="private_answers",
        users=20_000,
        public={
            "questions, random answers": PublicPrompts("asset:private-answers", "public", 1500)
        },
        method="today",
        changes={"rollout.responses": 8},
    ),
    "praise": Task(
        title="Praise for everything, which public prompts teach as well",
        recipe="imdb_sentiment",
        users=23_000,
        public={
            "sentences": PublicPrompts("asset:rotten-tomatoes", "train"),
            "100 reviews": PublicPrompts("asset:imdb", "public", 100, _FIRST),
            "1,500 reviews": PublicPrompts("asset:imdb", "public", 1500, _FIRST),
        },
        guides={"path": "asset:rotten-tomatoes", "split": "train", **_WORDS},
        words={},
    ),
}


@dataclass(frozen=True)
class Cell:
    """One entry of a table: a task, what is trained on, ε (infinity without noise) and users.

    Attributes:
        task: Key of ``TASKS``.
        public: Name of the public prompts; empty for the private users.
        epsilon: ε of the private run, in nats; infinite for the non-private and the public runs.
        users: Number of users, or of public prompts in their place.
    """

    task: str
    public: str
    epsilon: float
    users: int

    def __post_init__(self) -> None:
        """Refuse a finite ε for public prompts, which have none."""
        assert not self.public or math.isinf(self.epsilon)


@dataclass(frozen=True)
class Setup:
    """What all runs of a call share.

    Attributes:
        model: "small", "smollm2", or a hub id or folder, which has the settings of "smollm2".
        clone: Folder of the repository, with its recipes.
        folder: Folder of the runs, and of the public rows that are written for them.
        policy: Changes that name the policy.
        extra: Changes of every run, for runs in miniature.
    """

    model: str
    clone: Path
    folder: Path
    policy: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> str:
        """The key of ``METHODS`` whose settings are used."""
        return "small" if self.model == "small" else "smollm2"

    def can_run(self, task: str) -> bool:
        """Return whether this model can do the task; the small one knows film words only."""
        return self.model != "small" or TASKS[task].words is not None

    def jobs(self, cell: Cell, seed: int) -> list[Job]:
        """Return a cell's runs of one seed: one, or two where the users' wishes are turned."""
        task = TASKS[cell.task]
        settings = self._settings(task, cell) | {"seed": seed}
        if cell.public:
            settings |= self._public_rows(task.public[cell.public], cell.users, seed)
            judged = ((), task.turned) if task.turned else ()
            return [self._job(task, cell, seed, overrides_of(settings), judged)]
        pool = task.users - TUNING_USERS
        settings |= {
            "data.limit": cell.users,
            "data.skip": seed * cell.users % (pool - cell.users + 1),
        }
        given = overrides_of(settings)
        pair = [given, (*given, *task.turned)] if task.turned else [given]
        return [self._job(task, cell, seed, overrides, ()) for overrides in pair]

    def judges(self, task: Task, run: Recipe) -> dict[str, dict[str, Any]]:
        """Return judges of sentiment that these runs are not trained on, as rewards by name.

        A task whose reward is not sentiment has none.

        Args:
            task: The task.
            run: The recipe of a run. What its own reward is multiplied by, and its weight,
                multiply a judge's score as well.
        """
        if task.words is None or "function" in task.words:
            return {}
        lexicon = self.clone / "scripts" / "worth" / "lexicon.py"
        found: dict[str, dict[str, Any]] = {"lexicon": {"function": f"{lexicon}:judge"}}
        if self.model == "small":
            recipe = load_recipe(self.clone / "recipes" / f"{task.recipe}.yaml")
            found["classifier"] = recipe.rewards[0].model_dump(mode="json", exclude_none=True)
        own = run.rewards[0]
        signs = {"times_column": own.times_column, "weight": own.weight}
        return {name: {**judge, **signs} for name, judge in found.items()}

    def _settings(self, task: Task, cell: Cell) -> dict[str, Any]:
        settings = {"evaluation.every": 4, **base(self.settings, self.clone)}
        settings.pop("rewards", None)
        if self.model == "small" and task.words is not None:
            settings["rewards"] = [{**word_reward(self.clone), **task.words}]
        few, many = RESPONSES
        settings["rollout.responses"] = few if cell.users <= FEW else many
        private = math.isfinite(cell.epsilon)
        method = task.small_method if self.settings == "small" else task.method
        settings |= METHODS[self.settings][method if private else "reference"]
        plain = {**PLAIN, "update.subspace": None}
        settings |= {"privacy.epsilon": cell.epsilon} if private else plain
        if settings.get("update.subspace") and task.guides:
            settings["update.subspace"] = {"data": {**task.guides}, **settings["update.subspace"]}
        return {**settings, **task.changes, **self.policy, **self.extra}

    def _public_rows(self, public: PublicPrompts, users: int, seed: int) -> dict[str, Any]:
        """Write the public rows, and return the changes by which a recipe trains on them."""
        text = json.dumps([public.__dict__, users, seed], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:12]
        file = self.folder / "public" / f"{name}.parquet"
        public.write(users, seed, file)
        return {
            "data.path": str(file),
            "data.split": "train",
            "data.skip": 0,
            "data.limit": users,
            "evaluation.declared_public": True,
        }

    def _job(
        self,
        task: Task,
        cell: Cell,
        seed: int,
        overrides: tuple[str, ...],
        judged: tuple[tuple[str, ...], ...],
    ) -> Job:
        """Name a run by its place and a digest of what it runs, wherever the clone is."""
        file = self.clone / "recipes" / f"{task.recipe}.yaml"
        if judges := self.judges(task, load_recipe(file, overrides=overrides)):
            overrides += overrides_of({"evaluation.judges": judges})
        recipe = load_recipe(file, overrides=overrides)
        text = json.dumps([recipe.model_dump(mode="json"), judged], sort_keys=True)
        for place in (self.folder, self.clone):
            text = text.replace(str(place), "")
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        what = "-".join(cell.public.replace(",", "").split()) or f"epsilon-{cell.epsilon:g}"
        name = f"{cell.task}-{what}-users-{cell.users}-seed-{seed}-{digest}"
        return Job(name, task.recipe, overrides, judged)


def set_up(model: str, clone: Path, folder: Path, *, write_only: bool = False) -> Setup:
    """Return the setup of a model: "small", "smollm2", or a hub id or folder of another one.

    The small model is trained on the first call. Another model has the settings of "smollm2".

    Args:
        model: Name of the model.
        clone: Folder of the repository.
        folder: Folder of the runs.
        write_only: Refuse a small model that is not there, in place of training it.
    """
    if model == "small":
        return Setup(
            model, clone, folder, small_policy(folder / "reviews-lm", clone, train=not write_only)
        )
    policy = {"policy.model_name_or_path": model, "policy.adapter.layers": None}
    return Setup(model, clone, folder, {} if model == "smollm2" else policy)
