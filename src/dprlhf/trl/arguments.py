"""The arguments of a private trainer: rows, model and tokenizer as TRL's trainers take them.

Errors name them as TRL does, for people who wrote a trainer and no recipe.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from datasets import concatenate_datasets
from peft import PeftModel
from trl.chat_template_utils import add_response_schema

from dprlhf.agents.rewards import ENVIRONMENT_REWARD, environment_reward, rewarding
from dprlhf.data.columns import listed_names
from dprlhf.data.given_rewards import GivenReward, is_model
from dprlhf.data.given_rows import rows_from
from dprlhf.errors import DprlhfError, one_line
from dprlhf.policies.adapters import fresh_lora
from dprlhf.recipe import AnyRecipe, Recipe, load_any_recipe
from dprlhf.rewards.reward import name_of
from dprlhf.runs.folder import RunFolder
from dprlhf.runs.opening import recipe_digest
from dprlhf.runs.trackers import flat
from dprlhf.trl.config import PrivacyFields

C = TypeVar("C", bound=PrivacyFields)


def rows_of(given: Any, name: str, columns: Sequence[str]) -> Any:
    """Return rows in memory as a ``datasets.Dataset`` that has these columns."""
    if given is None:
        of_users = "the users' prompts; without any there is nobody to protect"
        raise DprlhfError(f"{name}: give {of_users if name == 'train_dataset' else 'public rows'}")
    if isinstance(given, Mapping):
        some = next(iter(given), "train")
        raise DprlhfError(f"{name}: give one dataset, such as {name}[{some!r}], not all of them")
    if isinstance(given, str):
        raise DprlhfError(
            f"{name}={given!r}: give the rows, such as datasets.load_dataset({given!r},"
            " split='train')"
        )
    if not (isinstance(given, Iterable) or callable(given) or hasattr(given, "columns")):
        raise DprlhfError(
            f"{name}: give a datasets.Dataset or a list of rows, not a {type(given).__name__}"
        )
    rows = rows_from(given, "prompt")
    if not len(rows):
        raise DprlhfError(f"{name}: there are no rows")
    for column in columns:
        if column not in rows.column_names:
            names = listed_names(rows.column_names)
            raise DprlhfError(f"{name}: there is no column {column!r}; the columns are {names}")
    if images := [column for column in rows.column_names if column in ("image", "images")]:
        raise DprlhfError(
            f"{name}: the column {images[0]!r} would be given to the model in TRL, and the models"
            f" here read text alone: take it out, as with remove_columns({images[0]!r})"
        )
    return rows


def parts_of(given: Any) -> dict[str | None, Any]:
    """Return the datasets of ``eval_dataset`` by name; of one that is not in a dictionary, None."""
    if isinstance(given, Mapping) and not given:
        raise DprlhfError("eval_dataset: the dictionary is empty: give a dataset, or None")
    return dict(given) if isinstance(given, Mapping) else {None: given}


def together(parts: Iterable[Any]) -> Any:
    """Return the rows of several datasets in one; a column that some lack is None in these."""
    first, *others = parts
    try:
        return concatenate_datasets([first, *others]) if others else first
    except (ValueError, TypeError) as error:
        raise DprlhfError(
            f"eval_dataset: the run evaluates the rows of all datasets together, and their columns"
            f" differ ({one_line(error, 120)}): give one, and the others to evaluate()"
        ) from None


def adapter_in(model: Any, peft_config: Any) -> Any:
    """Return a trainer's ``peft_config``; of a ``PeftModel``, that of the adapter inside it."""
    if not isinstance(model, PeftModel):
        return peft_config
    if peft_config is not None:
        raise DprlhfError(
            "peft_config: the model has an adapter already (get_peft_model): give one of both"
        )
    adapter = fresh_lora(model)
    if adapter is None:
        raise DprlhfError(
            "model: of adapters in a PeftModel one LoRA is taken, without DoRA or modules beside"
            " it, and before it has been trained: give the base model and peft_config; to build on"
            " a trained adapter, merge_and_unload() it first"
        )
    return adapter


def without_adapter(model: Any) -> Any:
    """Return the base model of a ``PeftModel`` without its layers; anything else as it is."""
    if not isinstance(model, PeftModel):
        return model
    base = model.unload()
    vars(base).pop("peft_config", None)
    return base


def check_model(model: Any, quantization: Any) -> None:
    """Refuse what is neither the name of a model nor one, and to quantise one that is loaded."""
    if not (isinstance(model, str) or hasattr(model, "config")):
        raise DprlhfError(f"model: a {type(model).__name__} is no name and no transformers model")
    if quantization is not None and not isinstance(model, str):
        raise DprlhfError("quantization_config is for a model by name: this one is loaded")


def with_user_column(config: C, column: str | list[str] | None) -> C:
    """Return a copy of a config whose ``privacy_unit`` is the trainer's ``user_column``."""
    own: Any = copy.copy(config)
    if column is not None and not isinstance(column, str | list):
        raise DprlhfError(f"user_column: give the name of a column, or a list, not {column!r}")
    if column is not None:
        if own.privacy_unit not in (None, column):
            raise DprlhfError(
                f"user_column={column!r}, but args.privacy_unit is {own.privacy_unit!r}"
            )
        own.privacy_unit = column
    return cast(C, own)


def refuse_optimizers(optimizers: Any) -> None:
    """Refuse what a private trainer does not take, with the reason."""
    if optimizers not in (None, (), [], (None, None), [None, None]):
        raise DprlhfError(
            "optimizers: the optimizer steps along released gradients, and a resumed run makes it"
            " again: name it in args (optim, learning_rate, lr_scheduler_type)"
        )


def with_response_template(tokenizer: Any) -> None:
    """Give a tokenizer the response template of its chat template, where TRL knows one.

    One that has a template keeps it. For one that TRL does not know, calls are read as Qwen and
    Hermes models write them (:data:`dprlhf.agents.chat.PLAIN`).
    """
    if getattr(tokenizer, "response_template", None) is None:
        with contextlib.suppress(ValueError):
            add_response_schema(tokenizer)


def means_of(rewards: Sequence[GivenReward], names: Sequence[str]) -> dict[str, str]:
    """Return further names of the released mean: that of a sum does not show its terms."""
    if len(rewards) == 1 and rewards[0].settings.weight == 1.0:
        return {"reward": f"rewards/{names[0]}/mean"}
    return {}


def function_of(reward: GivenReward) -> Any:
    """Return what computes a reward: what was given, or the function or classifier of that name."""
    name = reward.settings.name
    return reward.given or (environment_reward if name == ENVIRONMENT_REWARD else name)


def name_in_logs(reward: GivenReward, environments: Any) -> str:
    """Return the name of a reward in the logs, as TRL gives it."""
    name, given = reward.settings.name, reward.given
    if given is None and name == ENVIRONMENT_REWARD:
        return "+".join(rewarding(environments))
    if given is None:
        return Path(name).name
    if is_model(given):
        return Path(str(getattr(given.config, "name_or_path", "") or type(given).__name__)).name
    return name_of(given)


NAMES = {
    "data.max_prompt_tokens": "privacy_max_prompt_tokens",
    "data.max_prompts_per_user": "privacy_max_prompts_per_user",
    "data 'in-memory'": "train_dataset",
    "evaluation.data in-memory": "eval_dataset",
    "evaluation.data": "eval_dataset",
    "kl.beta": "beta",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.schedule": "lr_scheduler_type",
    "policy.attn_implementation": "model_init_kwargs",
    "policy.dtype": "model_init_kwargs",
    "privacy.epsilon": "privacy_epsilon",
    "privacy.participations": "num_train_epochs",
    "participations": "num_train_epochs",
    "reward_range": "privacy_reward_range",
    "rollout.backend": "use_vllm",
    "rollout.max_new_tokens": "max_completion_length",
    "rollout.responses": "num_generations",
    "rollout.temperature": "temperature",
    "rounds": "max_steps",
    "update.clip_norm": "privacy_clip_norm",
}
"""The trainer's setting for each key of a recipe that an error may name."""

_PROSE = {"rounds": r"rounds:? (to )?\d|\d rounds", "participations": r"participations:? \d"}
"""How a key is written that is also an ordinary word."""


def told(text: str) -> str:
    """Return an error's text, followed by the trainer's settings for the keys that it names.

    >>> told("rollout.responses must be even, not 3")
    'rollout.responses must be even, not 3 (of this trainer: num_generations)'
    """
    parts = []
    for key, name in NAMES.items():
        pattern = _PROSE.get(key, rf"(?<![\w.]){re.escape(key)}(?![\w.])")
        if name not in text and name not in parts and re.search(pattern, text):
            parts.append(name)
    return f"{text} (of this trainer: {', '.join(parts)})" if parts else text


@contextlib.contextmanager
def in_trls_words() -> Iterator[None]:
    """Name the trainer's own settings in errors that name a recipe's keys."""
    try:
        yield
    except DprlhfError as error:
        if type(error) is not DprlhfError or (text := told(str(error))) == str(error):
            raise
        raise DprlhfError(text) from None


R = TypeVar("R", bound=AnyRecipe)

_TRLS = re.compile(r"checkpoint-\d+")
"""The name of a checkpoint of TRL's trainers."""

_SHOWN = 4
"""Most settings of another run that an error names."""

_LONGEST = 80
"""Characters of such a setting's value that it quotes."""


def continued(recipe: R, folder: RunFolder, again: bool | str | Path) -> R:
    """Return the recipe of the run to continue (``resume_from_checkpoint``), if it is its own."""
    place = folder.path if again is True else Path(str(again))
    if _TRLS.fullmatch(place.name):
        raise DprlhfError(
            f"resume_from_checkpoint={str(again)!r}: a private run has no folders {place.name}, as"
            " TRL's have: it goes on after its last finished round and never from an earlier one,"
            f" whose users would be drawn again. Pass True, with output_dir ({folder.path}) the"
            " folder of that run"
        )
    if place.name == folder.checkpoint.name and not (place / "recipe.yaml").exists():
        place = place.parent
    if not place.exists() or not folder.path.exists():
        missing = folder.path if place.exists() else place
        raise DprlhfError(
            f"resume_from_checkpoint: there is no {missing}. True continues the run in"
            f" output_dir ({folder.path}) after its last finished round; without such a"
            " run, call train() alone"
        )
    if place.resolve() != folder.path.resolve():
        raise DprlhfError(
            f"resume_from_checkpoint: a run continues in its own folder: give True and"
            f" output_dir={str(place)!r}"
        )
    folder.require()
    held: AnyRecipe = load_any_recipe(folder.recipe)
    own: AnyRecipe = recipe
    if isinstance(held, Recipe) and isinstance(recipe, Recipe):
        size = {"batch_size": held.rollout.batch_size}  # what "auto" became
        rollout = recipe.rollout.model_copy(update=size)
        own = recipe.model_copy(update={"rollout": rollout})
    if own.policy.dtype == "auto":
        settled = own.policy.model_copy(update={"dtype": held.policy.dtype})
        own = own.model_copy(update={"policy": settled})
    if recipe_digest(own) != recipe_digest(held):
        raise DprlhfError(
            f"{folder.path}: its settings are not this trainer's ({_other(own, held)});"
            " continue it with the same ones"
        )
    return cast(R, held)


def _other(own: AnyRecipe, held: AnyRecipe) -> str:
    """Return the settings in which two recipes differ, with both values."""
    mine, theirs = flat(own.model_dump(mode="json")), flat(held.model_dump(mode="json"))
    differ = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    shown = [
        f"{key} {one_line(mine.get(key), _LONGEST)}, there {one_line(theirs.get(key), _LONGEST)}"
        for key in differ[:_SHOWN]
    ]
    return "; ".join([*shown, *(["…"] if len(differ) > _SHOWN else [])])
