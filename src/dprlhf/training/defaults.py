"""What a run takes where nothing is said: one table for ``init``, ``train()`` and TRL's trainers.

Constants are the defaults of the recipe's sections. Here is what follows from the number of users,
the public rows and the model: the adapter, the rounds, and, with enough public rows, the subspace
with its step rule. A setting that is given stays, and one of a group (the adapter; subspace and
optimizer) leaves the whole group to whoever gave it. The table is in ``docs/trl.md``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from dprlhf.data.given_rows import rows_from
from dprlhf.data.in_memory import InMemoryInputs, rows_of
from dprlhf.data.public import public_users
from dprlhf.data.users import Users
from dprlhf.hub import hush_libraries
from dprlhf.recipe import Recipe

FEWEST_ROUNDS, MOST_ROUNDS, USERS_A_ROUND = 4, 16, 125

FEWEST_WITH_DIRECTIONS = 8
"""Least number of rounds with a subspace, where few users are set against little noise."""

EVALUATED = 128
"""Public rows of the evaluation, at most half of them, if directions are fitted to the others."""

DIRECTIONS = 16

GUIDES = 64
"""Public prompts to which a round's directions are fitted; more cost time and gained nothing."""

WIDE = 64
"""Least number of trained parameters for which so few directions save noise."""

TARGET_KL = 20.0

LOSS = "linear_reward"
"""The loss of logged feedback, where directions can be fitted to public rows."""

REWARD_KL = 5.0
"""The target divergence of that loss: further away its reward is no longer what users like."""

STEPS: dict[str, Any] = {"name": "normalized-sgd", "learning_rate": 2.0, "momentum": 0.6}
"""The step rule with a subspace; few steps are as long as that under the target divergence."""

NATURAL = 8.0
"""The longest step on fresh responses: natural directions take longer ones for a divergence."""


def with_defaults(
    values: Mapping[str, Any], *, users: int | None, public: int | None, model: Any
) -> dict[str, Any]:
    """Return the settings of a recipe, with those that follow from users, public rows and model."""
    made: dict[str, Any] = copy.deepcopy(dict(values))
    policy, evaluation = made.setdefault("policy", {}), made.get("evaluation")
    stage, config = made.get("stage", "rl"), config_of(model)
    if "adapter" not in policy:
        aligned = evaluation is not None and stage != "reward"
        policy["adapter"] = adapter_for(config, public_rows=aligned)
    update, works = made.setdefault("update", {}), stage != "reward"
    if stage == "reward":
        made.setdefault("optimizer", {"learning_rate": 0.003})  # a new head takes smaller steps
    if stage == "rl":
        made.setdefault("rollout", {}).setdefault("batch_size", "auto")
        works = update.get("name", "pg") in ("pg", "grpo") and not made["rollout"].get("agent")
    fewest, free = FEWEST_ROUNDS, "subspace" not in update and "optimizer" not in made
    if evaluation is not None and public is not None:
        taken = evaluation.get("prompts", max(2, min(EVALUATED, public // 2)))
        given = update.get("subspace")
        if isinstance(given, Mapping) and not given.get("data"):
            evaluation["prompts"] = taken  # its directions are fitted to the others
        works = works and _wide(config, policy["adapter"])
        if free and works and public - taken >= 2 * DIRECTIONS:
            evaluation["prompts"] = taken
            update["subspace"] = {"rank": DIRECTIONS, "target_kl": TARGET_KL}
            made["optimizer"] = dict(STEPS)
            if stage == "feedback" and update.setdefault("loss_type", LOSS) == LOSS:
                update["subspace"]["target_kl"] = REWARD_KL
            if stage == "rl" or update.get("loss_type") == LOSS:
                update["subspace"]["prompts"] = GUIDES  # each is sampled and scored
                made["optimizer"]["learning_rate"] = NATURAL
            fewest = FEWEST_WITH_DIRECTIONS
    if "rounds" not in made and update.get("loss_type") == LOSS:
        made["rounds"] = 1
    if "rounds" not in made:
        passes = made.get("privacy", {}).get("participations", 1)
        made["rounds"] = rounds_for(users, passes, fewest)
    return made


def _wide(config: Any, adapter: Mapping[str, Any]) -> bool:
    """Return whether there are enough parameters for directions; True for an unknown model."""
    if getattr(config, "hidden_size", None) is None:
        return True
    # A value projection's outputs: the narrowest module that is adapted by default. State-space
    # models have no heads.
    heads = getattr(config, "num_attention_heads", 1)
    width = config.hidden_size * (getattr(config, "num_key_value_heads", None) or heads)
    layers = adapter.get("layers") or range(getattr(config, "num_hidden_layers", 0))
    return bool(width // heads * len(layers) >= WIDE)


def completed(
    values: dict[str, Any], draft: Recipe, sources: InMemoryInputs, model: Any
) -> dict[str, Any]:
    """Return settings with defaults that follow from the rows themselves."""
    may_lack = draft.rows_may_lack_prompts
    users = None
    if "rounds" not in values:
        if sources.prompts is not None:  # a generator is read once
            sources.prompts = rows_from(sources.prompts, draft.data.prompt_column)
        users = Users(rows_of(draft.data, sources.prompts), draft.data, may_lack_prompts=may_lack)
    if draft.evaluation is not None and sources.evaluation_prompts is not None:
        column = draft.data.prompt_column
        sources.evaluation_prompts = rows_from(sources.evaluation_prompts, column)
    public = public_users(draft, sources.evaluation_prompts)
    return with_defaults(
        values,
        users=users.count if users is not None else None,
        public=public.count if public is not None else None,
        model=model,
    )


def rounds_for(users: int | None, participations: int = 1, fewest: int = FEWEST_ROUNDS) -> int:
    """Return up to 16 rounds, such that each has about 125 users to set against the noise.

    >>> rounds_for(300), rounds_for(1000), rounds_for(9000, 3), rounds_for(2), rounds_for(9, 1, 8)
    (4, 8, 18, 2, 8)
    """
    rounds = MOST_ROUNDS
    if users is not None:
        rounds = max(fewest, min(MOST_ROUNDS, users * participations // USERS_A_ROUND))
        rounds = min(rounds, users)
    participations = max(1, participations)  # fewer are refused elsewhere
    return -(-rounds // participations) * participations  # an allocation has as many in each pass


def config_of(model: Any) -> Any:
    """Return the config of a model's text part; None for a name whose config is not at hand."""
    hush_libraries()
    from transformers import AutoConfig

    from dprlhf.assets import resolve

    try:
        config = getattr(model, "config", None) or AutoConfig.from_pretrained(
            resolve(model), local_files_only=True
        )
        return config.get_text_config()
    except Exception:  # not on disk, or of another kind: loading it says why
        return None


def adapter_for(config: Any, *, public_rows: bool) -> dict[str, Any]:
    """Return the section ``policy.adapter``: one kind of module, in a few layers above the middle.

    The module is the value projection if PEFT names one for the type of model, otherwise the first
    that PEFT names (``c_attn`` for GPT-2).
    """
    hush_libraries()
    from peft.utils import constants

    made: dict[str, Any] = {"layers": [-2, -1]}
    if getattr(config, "num_hidden_layers", None) is not None:
        known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        names = sorted(known.get(config.model_type, ()))
        module = next((name for name in names if name.startswith("v")), None)
        first = config.num_hidden_layers // 2
        count = max(1, min(8, config.num_hidden_layers // 4))
        made = {
            "target_modules": [module or names[0]] if names else None,
            "layers": list(range(first, first + count)),
        }
    return made | ({"init": "public-activations"} if public_rows else {})
