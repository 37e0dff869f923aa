"""The rivals' methods on one footing: each trains on the same users, and is measured alike.

All of them train the same adapter of the small public model in as many rounds, take every user
once by the same partition, and step by the same server-side optimizer. The unit is the user, and
the stated ε is all that a method spends on its users. Whatever is made of a user for a rival
(samples of the base model to the user's prompt, which of them the user likes better) depends on
that user alone and stays with the run.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd

from dprlhf import load_recipe, train, train_stage
from dprlhf.data.loading import load_rows
from dprlhf.data.public import HELD_OUT
from dprlhf.data.users import Prompts, Users
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.loading import load_policy
from dprlhf.recipe import Recipe
from dprlhf.recipe.supervised import STAGES
from dprlhf.rewards import Scorer, load_reward
from dprlhf.rewards.private import score_responses
from dprlhf.rollout import sample
from dprlhf.training.reinforcement import Result
from dprlhf.worth.runs import overrides_of, rise_under
from dprlhf.worth.tasks import TASKS, TUNING_USERS, PublicPrompts
from dprlhf.worth.taste import prefers
from noise.many_runs import ROOT

EVALUATED = 384
"""Held-out public prompts on which every run is measured."""
TUNING_PROMPTS = 640
"""Held-out prompts that come before those on which settings are chosen."""
WORDS = {"function": "word_sentiment:reward"}
"""The small model's reward, by its module's name, so that its word list is read once."""
ROUNDS, RESPONSES, NEW_TOKENS, DELTA = 8, 4, 8, 1e-5
TASTE = "taste"
"""The task whose users say of two texts which one they like better, and say nothing else."""
NAMES = {"praise": "praise", "labels": "their labels"}
"""What public sentences ask for, by the name of the setting."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a method is trained.

    Attributes:
        task: Key of ``dprlhf.worth.tasks.TASKS``.
        users: Number of users, and of public prompts in their place.
        epsilon: ε in nats; infinite without noise and clipping.
        seed: Draws the users, the adapter's start and the samples.
        small: Folder of the small public model.
        tuning: Whether to take users, and held-out prompts, that are in no table.
    """

    task: str
    users: int
    epsilon: float
    seed: int
    small: Path
    tuning: bool = False


def recipe_for(place: Place, changes: Settings) -> Recipe:
    """Return the task's recipe for a method, at its place.

    Args:
        place: The task and its users.
        changes: Changes of the method; they win.
    """
    task = TASKS[place.task]
    pool = task.users - TUNING_USERS
    first = place.seed * place.users % (pool - place.users + 1)
    if place.tuning:
        first = pool + place.seed * place.users % (TUNING_USERS - place.users + 1)
    settings: dict[str, Any] = {
        "policy.model_name_or_path": str(place.small),
        "policy.adapter.layers": [2, 3],
        "policy.dtype": "float32",
        "data.skip": first,
        "data.limit": place.users,
        "rewards": [{**WORDS, **(task.words or {}), **taste_of(place)}],
        "rounds": ROUNDS,
        "rollout.responses": RESPONSES,
        "rollout.max_new_tokens": NEW_TOKENS,
        "rollout.batch_size": 64,
        "update.batch_size": 64,
        "optimizer.name": "normalized-sgd",
        "optimizer.momentum": 0.6,
        "privacy.delta": DELTA,
        "privacy.epsilon": place.epsilon if math.isfinite(place.epsilon) else ".inf",
        "evaluation.prompts": EVALUATED,
        "evaluation.data.skip": TUNING_PROMPTS if place.tuning else 0,
        "seed": place.seed,
    }
    if math.isinf(place.epsilon):
        settings["update.clip_norm"] = ".inf"
    file = ROOT / "recipes" / f"{task.recipe}.yaml"
    return load_recipe(file, overrides=overrides_of({**settings, **changes}))


def taste_of(place: Place) -> dict[str, str]:
    """Return the reward of the secret taste of a seed, on the task that has one; else nothing."""
    known = place.task == TASTE
    return {"function": f"dprlhf.worth.taste:reward_{place.seed}"} if known else {}


@dataclass(frozen=True)
class Outcome:
    """A trained policy.

    Attributes:
        gain: Rise of the mean reward over the base model on the held-out public prompts; the
            prompts and the draws are the same for all methods.
        epsilon: ε that was spent on the users, in nats.
    """

    gain: float
    epsilon: float


def reinforced(recipe: Recipe, folder: Path) -> Result:
    """Train by private or plain updates."""
    shutil.rmtree(folder, ignore_errors=True)
    return train(recipe, output_dir=folder, quiet=True)


def outcome(result: Result) -> Outcome:
    """Return what a run with the task's own reward reports of itself."""
    assert result.difference is not None
    return Outcome(result.difference.mean, result.plan.guarantee.epsilon)


@lru_cache(maxsize=2)
def liked(place: Place) -> tuple[Prompts, list[list[str]]]:
    """Return the users' prompts and base samples to each, those that the user likes best first.

    A user's order is that of its own reward, so it depends on no other user. On "taste" a user only
    compares the first two samples, and the other two: the order is the winner of the first pair,
    that of the second, and who lost to them, as :func:`pairs_of` takes them. The samples are the
    base model's, the same for each method and ε.

    Args:
        place: The users, at an infinite ε.
    """
    recipe = recipe_for(place, {})
    users = Users(load_rows(recipe.data), recipe.data)
    prompts = users.select(np.arange(users.count))
    policy = load_policy(recipe.policy, seed=recipe.seed)
    with policy.base():
        found = sample(
            policy,
            prompts,
            recipe.rollout,
            key=bytes(32),
            context=("rivals", recipe.seed),
            max_prompt_tokens=recipe.data.max_prompt_tokens,
        )
    scorer = Scorer([load_reward(one) for one in recipe.rewards], recipe.reward_range)
    rewards = score_responses(scorer, found).values.reshape(len(prompts), -1)
    texts = [found.texts[i : i + RESPONSES] for i in range(0, len(found.texts), RESPONSES)]
    order = np.argsort(-rewards, axis=1, kind="stable")
    if place.task == TASTE:
        random = np.random.default_rng((recipe.seed, place.users))
        loses = [~prefers(rewards[:, i], rewards[:, i + 1], random) for i in (0, 2)]
        first, second = loses[0].astype(int), 2 + loses[1].astype(int)
        order = np.stack([first, second, 5 - second, 1 - first], axis=1)
    return prompts, [[some[i] for i in best] for some, best in zip(texts, order, strict=True)]


def preferences(place: Place) -> tuple[Prompts, list[list[str]]]:
    """Return :func:`liked`, which is the same at every ε."""
    return liked(replace(place, epsilon=math.inf))


def pairs_of(prompts: Prompts, ordered: list[list[str]], pairs: int) -> pd.DataFrame:
    """Return pairs of each user: the best sample over the worst, the next over the next, ..."""
    return pd.DataFrame(
        {"user": str(user), "prompt": prompt, "chosen": texts[i], "rejected": texts[-1 - i]}
        for user, (prompt, texts) in enumerate(zip(prompts.prompts, ordered, strict=True))
        for i in range(pairs)
    )


def own_texts(recipe: Recipe, prompts: Prompts) -> pd.DataFrame:
    """Return the users' prompts and how each went on in that user's own text."""
    texts, words = load_rows(recipe.data)[recipe.data.prompt_column], recipe.data.prompt_words or 0
    rest = [" " + " ".join(str(text).split()[words : words + NEW_TOKENS]) for text in texts]
    return pd.DataFrame({"prompt": prompts.prompts, "completion": rest})


def public_rows(recipe: Recipe, count: int) -> list[str]:
    """Return the public prompts that follow the evaluation's, to which the adapter is aligned."""
    assert recipe.evaluation is not None
    rows = Users(load_rows(recipe.evaluation.data), recipe.evaluation.data)
    first = recipe.evaluation.prompts
    found: list[Any] = rows.select(np.arange(first, first + count)).prompts
    return found


def staged(
    stage: str, recipe: Recipe, rows: pd.DataFrame, folder: Path, clip: float, **changes: Any
) -> tuple[Any, float]:
    """Train a supervised stage on rows of the users; return the model and the ε spent.

    Args:
        stage: ``sft``, ``dpo`` or ``reward``.
        recipe: The task's recipe, whose policy, optimizer, rounds and privacy are taken.
        rows: The users' rows.
        folder: The run folder.
        clip: Clip norm.
        changes: Further sections of the stage's recipe.
    """
    shutil.rmtree(folder, ignore_errors=True)
    privacy = recipe.privacy.model_dump(include={"epsilon", "delta", "partition"})
    own = {"max_prompts_per_user": int(rows["user"].value_counts().max())} if "user" in rows else {}
    data: dict[str, Any] = {"path": "in-memory", "max_prompt_tokens": 16}
    data |= {"max_completion_tokens": NEW_TOKENS} if stage != "reward" else {"max_tokens": 32}
    given = data | ({"user_column": "user", **own} if own else {})
    model = {"model": changes.pop("model")} if stage == "reward" else {"policy": recipe.policy}
    made = STAGES[stage].model_validate(
        {
            **{
                name: getattr(one, "model_dump", lambda one=one: one)()
                for name, one in model.items()
            },
            "data": given,
            "update": {"clip_norm": clip, "batch_size": 64, **changes.pop("update", {})},
            "optimizer": recipe.optimizer.model_dump(),
            "privacy": privacy,
            "rounds": recipe.rounds,
            "evaluation": {"data": data, "prompts": 2},
            "seed": recipe.seed,
            **changes,
        }
    )
    asked = public_rows(recipe, HELD_OUT)
    public = [
        {"prompt": p, "completion": " a film", "chosen": " a film", "rejected": " the film"}
        for p in asked
    ]
    result = train_stage(
        made,
        data=rows.to_dict("records"),
        evaluation_data=public,
        output_dir=folder,
        quiet=True,
    )
    return result.policy, result.plan.guarantee.epsilon


def public_scorer(small: Path, task: str) -> Path:
    """Return the folder of a public classifier where a learnt reward starts; made on first call.

    It is the small model with a head, fitted to the public sentences: to their labels, or on
    "taste" to how many words of each group they have, and then with a head of zeros.
    """
    kind = "words" if task == TASTE else "labels"
    folder = small.parent / ("word-scorer" if task == TASTE else "reviews-scorer")
    if not (folder / "config.json").exists():
        script = ROOT / "scripts" / "worth" / "scorer.py"
        command = [sys.executable, str(script), str(small), str(folder), "--to", kind]
        subprocess.run(command, check=True)
    return folder


def with_public(place: Place, public: PublicPrompts, folder: Path) -> dict[str, Any]:
    """Write public prompts in the users' place; return the changes that train on them."""
    file = folder.with_suffix(".parquet")
    file.unlink(missing_ok=True)
    public.write(place.users, place.seed, file)
    return {
        "data.path": str(file),
        "data.split": "train",
        "data.skip": 0,
        "data.limit": place.users,
        "evaluation.declared_public": True,
    }


# --- the methods ----------------------------------------------------------------------------


def by_updates(place: Place, setting: Settings, folder: Path) -> Outcome:
    """Private (or, at an infinite ε, plain) policy gradients on the users: DP-PG and DP-GRPO."""
    changes = _steps(setting) | {"update": _update(place, setting)}
    return outcome(reinforced(recipe_for(place, changes), folder))


def _update(place: Place, setting: Settings) -> dict[str, Any]:
    bound = math.inf if math.isinf(place.epsilon) else setting.get("clip", 1.0)
    update: dict[str, Any] = {
        "name": setting.get("update", "pg"),
        "clip_norm": bound,
        "batch_size": 64,
    }
    if "rank" in setting:
        guides = dict(TASKS[place.task].guides)
        update["subspace"] = {"data": guides, "rank": setting["rank"], "prompts": 128, "refresh": 4}
    if update["name"] == "pg":
        update["baseline"] = "loo"
    return update


def by_texts(place: Place, setting: Settings, folder: Path) -> Outcome:
    """DP-SFT on a text of each user: its own, or the one of four base samples that it likes."""
    recipe = recipe_for(place, _steps(setting))
    prompts, ordered = preferences(place)
    rows = own_texts(recipe, prompts)
    if setting["text"] == "best":
        rows["completion"] = [texts[0] for texts in ordered]
    return judged(place, *staged("sft", recipe, rows, folder, setting["clip"]))


def by_pairs(place: Place, setting: Settings, folder: Path) -> Outcome:
    """DP-DPO on pairs of base samples that the user's own reward orders, clipped together."""
    recipe = recipe_for(place, _steps(setting))
    rows = pairs_of(*preferences(place), setting["pairs"])
    return judged(place, *staged("dpo", recipe, rows, folder, setting["clip"]))


def by_reward(place: Place, setting: Settings, folder: Path) -> Outcome:
    """A reward learnt from the users' pairs with privacy, then plain updates on public prompts.

    With ``split`` the updates are on private prompts, and private as well. Either one half of the
    users gives pairs and the other half prompts, each at ε ("users"), or all give both, each at
    ε/2 and δ/2 ("budget"), which together cost at most (ε, δ).
    """
    split, half = setting.get("split"), place.users // 2
    each: dict[str, Any] = {}
    if split == "budget" and math.isfinite(place.epsilon):
        each = {"privacy.epsilon": place.epsilon / 2, "privacy.delta": DELTA / 2}
    recipe = recipe_for(place, each | {"optimizer.learning_rate": setting["reward rate"]})
    model = {
        "model_name_or_path": str(public_scorer(place.small, place.task)),
        "adapter": {**recipe.policy.adapter.model_dump(), "init": "random"},
    }
    rows = pairs_of(*preferences(place), 1).drop(columns="user")
    rows = rows[:half] if split == "users" else rows
    learnt = folder.with_name(f"{folder.name}-reward")
    _, epsilon = staged("reward", recipe, rows, learnt, setting["clip"], model=model)
    if split is None:
        changes = with_public(place, public_of(place.task, "praise"), folder)
        changes |= {"privacy.epsilon": ".inf", "update.clip_norm": ".inf"}
    else:
        changes = each | {"update": _update(place, {"rank": setting["rank"]})}
    if split == "users":
        changes |= {"data.skip": recipe.data.skip + half, "data.limit": place.users - half}
    known = "shared" if split == "budget" else "disjoint"
    changes |= _steps(setting) | {
        "rewards": [{"classifier": str(learnt / "model"), "batch_size": 64}],
        "previous": [{"run": str(learnt), "users": known}],
        # The task's reward judges it below; the rows to which the adapter is aligned stay the same.
        "evaluation.prompts": 2,
        "evaluation.data.skip": (TUNING_PROMPTS if place.tuning else 0) + EVALUATED - 2,
    }
    tuned = reinforced(recipe_for(place, changes), folder)
    spent = tuned.plan.guarantee.epsilon
    total = {None: epsilon, "users": max(epsilon, spent), "budget": epsilon + spent}
    return judged(place, tuned.policy, total[split])


def by_public(place: Place, setting: Settings, folder: Path) -> Outcome:
    """Plain updates on public prompts, in which no user is looked at: ε = 0."""
    changes = with_public(place, public_of(place.task, setting["rows"]), folder)
    found = outcome(reinforced(recipe_for(place, changes | _steps(setting)), folder))
    return replace(found, epsilon=0.0)


def _steps(setting: Settings) -> dict[str, Any]:
    return {
        "optimizer.learning_rate": setting["rate"],
        "optimizer.momentum": setting.get("momentum", 0.6),
    }


def judged(place: Place, policy: CausalLMPolicy, epsilon: float) -> Outcome:
    """Return the gain of a policy by the task's reward, which trained it only indirectly."""
    return Outcome(rise_under(policy, recipe_for(place, {})), epsilon)


Method = Callable[[Place, Settings, Path], Outcome]


def measure(method: Method, place: Place, setting: Settings, folder: Path) -> dict[str, float]:
    """Train by a method; return its gain, the ε spent (−1 for infinity) and processor seconds."""
    start = time.process_time()
    found = method(place, setting, folder)
    return {
        "gain": found.gain,
        "epsilon": found.epsilon if math.isfinite(found.epsilon) else -1.0,
        "seconds": time.process_time() - start,
    }


def public_of(task: str, name: str) -> PublicPrompts:
    """Return public prompts of a task: sentences that ask for praise, or for what their labels say;
    or the rated reviews after those of the evaluation.
    """
    if name == "reviews":
        path = load_recipe(ROOT / "recipes" / f"{TASKS[task].recipe}.yaml").data.path
        return PublicPrompts(path, "public", 100, EVALUATED + HELD_OUT)
    known = TASKS[task].public
    return known.get(f"sentences, {NAMES[name]}") or known["sentences"]
