"""The privacy card: what a run guarantees, in JSON and in the model card."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dprlhf.privacy.gaussian import downwards, upwards
from dprlhf.privacy.plan import Plan, json_ready
from dprlhf.privacy.randomness import commitment
from dprlhf.recipe import AnyRecipe, Recipe, load_any_recipe
from dprlhf.runs.earlier import Earlier, run_of_model, total
from dprlhf.runs.folder import RunFolder, write_atomically, write_json

_NEIGHBOURS = {
    "add-remove": "one user is added or removed",
    "zero-out": "one user's data is replaced by nothing",
    "replace-one": "one user's data is replaced by another user's",
}

_FITTED = {
    False: "it was not fitted on the users",
    True: "declared as fitted on the users, at a privacy cost that is not counted here",
}

_TUNING = {
    None: "not declared; each tuning run on the same users would cost its own ε",
    0: "declared: none on the same users",
}

_ADAPTERS = {
    "lora": "A LoRA adapter (rank {rank})",
    "lora-b": "A LoRA adapter (rank {rank}, A frozen at its start, B trained)",
    "lora-xs": "A LoRA-XS adapter (trained {rank} x {rank} matrices, stored as LoRA)",
    "vera": "A VeRA adapter (rank {rank}, two trained vectors for each layer)",
    "ia3": "An IA3 adapter (trained scales)",
    "norms": "Trained norm layers (PEFT's LN tuning)",
    "biases": "Trained biases (stored as LoRA whose B is zero)",
}
"""By the type in the recipe: what the folder ``policy/`` holds."""

_REWARDS = {
    True: ["a reward scores a completion alike in any batch (checked on public prompts)"],
    False: [],
}
_RELEASED = {
    "pg": "gradient of each round",
    "grpo": "gradient of the surrogate in each round",
    "ppo": "move of the users' copies of the policy in each round",
    "rebel": "gradient of the loss at each step, {releases} in each round",
    "projected-sgd": "gradient of a regression at each step, {releases} in each round",
    "improper-batch-sgd": "gradient of a regression at each step, {releases} in each round",
    "sufficient-statistics": "sufficient statistics of a regression in each round",
    "sft": "gradient of each round",
    "reward": "gradient of each round",
}
"""By the oracle where an update asks one, else by the update or stage: the mean of what."""


def privacy_card(
    recipe: AnyRecipe, plan: Plan, dimension: int, key: bytes, earlier: Earlier
) -> dict[str, Any]:
    """Return the guarantee and everything that it rests on, JSON-ready.

    With earlier runs it states their ``total`` beside the guarantee of this run alone.
    """
    unit = (
        f"all rows with one value of '{recipe.data.user_column}'"
        if recipe.data.user_column
        else "one row of the prompt dataset"
    )
    what = _RELEASED[_released_by(recipe)].format(releases=plan.releases_per_round)
    released = [f"the noised mean {what}, and what follows from it: the model"]
    if isinstance(recipe, Recipe) and recipe.privacy.reward_share:
        where = "same release" if plan.releases_per_round == 1 else "first of these releases"
        released.append(f"the noised mean reward and count of each round, in the {where}")
    critic = getattr(recipe.update, "critic", None)
    if critic is not None:
        released.append(
            f"the noised step of a critic of {1 + critic.features} numbers in each round, in the"
            f" same release: {critic.share:g} of its budget, at noise multiplier"
            f" {plan.noise_multiplier / critic.share**0.5:.4g}"
        )
    most = recipe.data.max_prompts_per_user
    return {
        "private": plan.private,
        "unit": f"user = {unit}, at most {most} prompt{'s' if most > 1 else ''}",
        "neighbouring": _NEIGHBOURS[plan.adjacency],
        **plan.terms(),
        **({"total": _total(plan, earlier)} if earlier else {}),
        "sensitivity": plan.sensitivity if plan.private else None,
        "dimension": dimension,
        "noise_to_clip_ratio": plan.noise_to_clip_ratio(dimension),
        "released": released,
        "assumed_public": [
            f"the {name}: {_origin(path, fitted, earlier)}"
            for name, path, fitted in _models(recipe)
        ]
        + [
            f"the number of users, {plan.users}",
            "the recipe, its seed, and the public evaluation prompts",
            *_selection(recipe),
        ],
        "assumptions": [
            *plan.guarantee.assumptions,
            "secret/ stays secret: it holds the key that allocation and noise come from",
            "a row of a micro-batch, whose shape is fixed, rounds alike wherever it stands",
            *_REWARDS[isinstance(recipe, Recipe)],
            *([] if earlier.tuning_runs else ["the recipe was not tuned on the same users"]),
        ],
        "tuning": _TUNING.get(recipe.privacy.tuning_runs)
        or f"declared: {_runs(earlier)} on the same users, which the total counts",
        "run": commitment(key),
    }


def _selection(recipe: AnyRecipe) -> list[str]:
    data = recipe.data
    if not data.skip and data.limit is None:
        return []
    # If a row went and the limit let another one in, two users would have changed.
    return ["which rows data.skip and data.limit select: neighbouring datasets differ among these"]


def audit_of(folder: RunFolder) -> dict[str, Any]:
    """Return what a run's card says of an audit, for the card to be written; nothing if nothing."""
    if not folder.privacy.is_file():
        return {}
    card = json.loads(folder.privacy.read_text())
    return {"audit": card["audit"]} if "audit" in card else {}


def note_audit(folder: RunFolder, audit: dict[str, Any]) -> None:
    """Write an audit's result onto the card of a finished run, and into its model card."""
    card = json.loads(folder.privacy.read_text()) | {"audit": audit}
    write_json(folder.privacy, card)
    write_atomically(
        folder.policy / "README.md", model_card(load_any_recipe(folder.recipe), card).encode()
    )


def _released_by(recipe: AnyRecipe) -> str:
    if not isinstance(recipe, Recipe):
        return recipe.stage
    oracle = getattr(recipe.update, "oracle", None)
    if oracle is None or getattr(recipe.update, "solver", None) == "gradient":
        return recipe.update.name
    return str(oracle.name)


def _models(recipe: AnyRecipe) -> Iterator[tuple[str, str, bool]]:
    """Yield what the run starts from: its name, its place, and whether it is declared fitted."""
    base = recipe.policy if isinstance(recipe, Recipe) else recipe.trained
    yield (
        f"base model {base.model_name_or_path}",
        base.model_name_or_path,
        base.trained_on_private_users,
    )
    if isinstance(recipe, Recipe):
        for name, reward in zip(reward_names(recipe), recipe.rewards, strict=True):
            yield f"reward {name}", reward.classifier or "", reward.trained_on_private_users


def _origin(path: str, fitted: bool, earlier: Earlier) -> str:
    run = run_of_model(path)
    for record in earlier.records:
        if run is not None and record.run == run:
            return f"released by the earlier run {record.name}, whose cost the total counts"
    return _FITTED[fitted]


def _total(plan: Plan, earlier: Earlier) -> dict[str, Any]:
    cost = total(plan, earlier)
    apart = set(earlier.disjoint)
    return {
        "epsilon": json_ready(cost.epsilon),
        "epsilon_lower": json_ready(cost.epsilon_lower),
        "delta": cost.delta,
        "accountant": cost.accountant,
        "runs": ", ".join(
            ([_runs(earlier)] if earlier.tuning_runs else [])
            + [
                f"{record.name} ({record.stage}, "
                + ("other users)" if record.run in apart else "users may be shared)")
                for record in earlier.records
            ]
        ),
    }


def _runs(earlier: Earlier) -> str:
    return f"{earlier.tuning_runs} tuning run" + ("s" if earlier.tuning_runs > 1 else "")


def reward_names(recipe: Recipe) -> list[str]:
    """Return what the recipe calls its rewards."""
    return [str(r.function or r.classifier or r.plugin) for r in recipe.rewards]


def is_hub_id(model: str) -> bool:
    """Return whether a model's name is that of a hub repository, not a folder or an asset."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", model)) and not Path(model).exists()


def guarantee_sentence(card: dict[str, Any]) -> str:
    """Return the guarantee in one sentence."""
    if not card["private"]:
        return "No privacy: this run adds no noise. It is a baseline for comparison."
    alone = (
        f"({upwards(card['epsilon'], 4)}, {upwards(card['delta'], 3)})-differential privacy where"
        f" neighbouring datasets differ in that {card['neighbouring']}; {card['unit']}; partition"
        f" {card['partition']}, {card['rounds']} rounds, noise multiplier"
        f" {card['noise_multiplier']:.4g}."
    )
    if "total" not in card:
        return alone
    whole = card["total"]
    return (
        f"In total, with {whole['runs']}: ({upwards(whole['epsilon'], 4)},"
        f" {upwards(whole['delta'], 3)})-differential privacy. This run alone: {alone}"
    )


def model_card(recipe: AnyRecipe, card: dict[str, Any], *, merged: bool = False) -> str:
    """Return the model's README with the standard metadata and a privacy section.

    Args:
        recipe: of the run.
        card: of the run, from :func:`privacy_card`.
        merged: of whole weights, not of the adapter.
    """
    public = "\n".join(f"- {line}" for line in card["assumed_public"])
    assumptions = "\n".join(f"- {line}" for line in card["assumptions"])
    trained = recipe.policy if isinstance(recipe, Recipe) else recipe.trained
    base = trained.model_name_or_path
    # The hub refuses a card whose base model is no repository.
    relation = "finetune" if merged else "adapter"
    named = f"base_model: {base}\nbase_model_relation: {relation}\n" if is_hub_id(base) else ""
    task, tag, how = _about(recipe)
    adapter = _ADAPTERS[trained.adapter.type].format(rank=trained.adapter.rank)
    if merged:
        adapter = f"Whole weights with the adapter merged ({adapter[0].lower()}{adapter[1:]})"
    lower = downwards(float(card["epsilon_lower"]), 4)
    return f"""---
{named}library_name: {"transformers" if merged else "peft"}
pipeline_tag: {task}
tags:
- dprlhf
- differential-privacy
- {tag}
---

# {base} tuned with dprlhf

{adapter}, {how}.

## Privacy

{guarantee_sentence(card)}

Accountant: {card["accountant"]}; lower bound on the same ε: {lower}.

Hyperparameter tuning: {card["tuning"]}.

Audit: {_audited(card)}.

Assumed public:

{public}

Assumptions:

{assumptions}
"""


def _audited(card: dict[str, Any]) -> str:
    if "audit" not in card:
        return "not run"
    audit = card["audit"]
    word = "refuted: " if not audit["holds"] else ""
    return (
        f"{word}an attack with {audit['canaries']} canary users ({audit['space']} space) shows"
        f" epsilon >= {audit['bound']:.4g} at confidence {audit['confidence']:.0%}"
    )


def _about(recipe: AnyRecipe) -> tuple[str, str, str]:
    """Return the hub's task, a tag, and how the adapter came to be."""
    if isinstance(recipe, Recipe):
        how = (
            f"tuned on private\nprompts by the update `{recipe.update.name}` with the rewards"
            f" {', '.join(reward_names(recipe))}"
        )
        return "text-generation", "reinforcement-learning", how
    if recipe.stage == "sft":
        return "text-generation", "sft", "fitted to private documents"
    kind = "preference pairs" if recipe.labels is None else f"labels ({', '.join(recipe.labels)})"
    return "text-classification", "reward-model", f"fitted to private {kind}"
