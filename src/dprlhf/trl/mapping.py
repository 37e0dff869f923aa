"""From TRL's settings to a recipe: what a private trainer starts is an ordinary run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from dprlhf.errors import DprlhfError
from dprlhf.recipe import IN_MEMORY, Recipe, make_recipe
from dprlhf.recipe.loading import recipe_from
from dprlhf.recipe.trl_names import rollout_settings, update_settings
from dprlhf.training.defaults import with_defaults
from dprlhf.trl.config import AUTO, PrivacyFields, PrivateRLOOConfig, defaults

if TYPE_CHECKING:
    from dprlhf.recipe import FeedbackRecipe

_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
_MODEL_SETTINGS = ("revision", "dtype", "torch_dtype", "attn_implementation", "trust_remote_code")


def recipe_of(
    config: PrivacyFields,
    *,
    model: Any,
    adapter: dict[str, Any] | None,  # The section policy.adapter
    rewards: Sequence[dict[str, Any]],
    users: int,
    public: int,  # Number of public prompts for the evaluation; 0 without
    quantization: Mapping[str, str] | None = None,
    agent: dict[str, Any] | None = None,
) -> Recipe:
    """Return the recipe of a private trainer."""
    args: Any = config
    turns = getattr(args, "max_tool_calling_iterations", None)
    values: dict[str, Any] = {
        **_shared(args, model, adapter, quantization),
        "rewards": list(rewards),
        "reward_range": _reward_range(args),
        "rollout": {
            "responses": args.num_generations,
            "max_new_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "min_p": args.min_p,
            "mask_truncated": args.mask_truncated_completions,
            "batch_size": "auto",
            "backend": "vllm" if args.use_vllm else "transformers",
            **rollout_settings(args.generation_kwargs or {}),  # they take precedence in TRL
            "agent": {**agent, "max_tool_calling_iterations": turns} if agent else None,
        },
        "update": {**_update(args), **_contribution(args)},
        "kl": {"beta": args.beta},
    }
    values = _completed(values, args, users=users, public=public, model=model)
    return make_recipe(values, source=type(config).__name__)


def _completed(
    values: dict[str, Any], args: Any, *, users: int, public: int, model: Any
) -> dict[str, Any]:
    """Return settings with the evaluation, the optimizer, and the defaults of what is not given."""
    if public:
        declared = args.privacy_declared_public
        values["evaluation"] = {"data": {"path": IN_MEMORY}, "declared_public": declared}
    elif _steps(args):
        raise DprlhfError("eval_strategy='steps': give eval_dataset, public rows to evaluate on")
    own = defaults(type(args))
    if any(getattr(args, n) != own[n] for n in ("learning_rate", "optim", "lr_scheduler_type")):
        values["optimizer"] = {}  # some of it is given, and the rest are the recipe's defaults
    values = with_defaults(values, users=users, public=public or None, model=model)
    if values.get("optimizer") == {}:
        values["optimizer"] = _optimizer(args)
    if public:
        values["evaluation"]["every"] = _every(args, values["rounds"])
    return values


def feedback_recipe_of(
    config: PrivacyFields,
    *,
    model: Any,
    adapter: dict[str, Any] | None,
    users: int,
    public: int,
    quantization: Mapping[str, str] | None = None,
) -> FeedbackRecipe:
    """Return the recipe of a trainer on logged feedback; see :func:`recipe_of`."""
    args: Any = config
    values: dict[str, Any] = {
        **_shared(args, model, adapter, quantization),
        "stage": "feedback",
        "data": {**_data(args), "max_completion_tokens": args.max_completion_length},
        "update": {
            "loss_type": args.loss_type,
            "beta": args.beta,
            "value_rounds": args.privacy_value_rounds,
            **_contribution(args),
        },
    }
    values = _completed(values, args, users=users, public=public, model=model)
    return cast("FeedbackRecipe", recipe_from(values, (), source=type(config).__name__))


def _shared(
    args: Any, model: Any, adapter: dict[str, Any] | None, quantization: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return the sections that the recipe of each trainer has."""
    participations = args.privacy_participations
    if participations is None:
        participations = _epochs(args.num_train_epochs)
    return {
        "policy": {
            **_policy(args),
            **(quantization or {}),
            "model_name_or_path": model if isinstance(model, str) else IN_MEMORY,
            **({} if adapter is None else {"adapter": adapter}),
        },
        "data": _data(args),
        "privacy": {
            "epsilon": args.privacy_epsilon,
            "noise_multiplier": args.privacy_noise_multiplier,
            "delta": args.privacy_delta,
            "partition": args.privacy_partition,
            "adjacency": args.privacy_adjacency,
            "participations": participations,
            "book": args.privacy_book,
        },
        **({"rounds": int(args.max_steps)} if args.max_steps > 0 else {}),
        "tracking": {"report_to": args.report_to},
        "previous": [{"run": run} for run in args.privacy_previous],
        "seed": args.seed,
        "output_dir": args.output_dir,
    }


def with_evaluation(recipe: Any, config: PrivacyFields, public: int, *, declared: bool) -> Any:
    """Return a trainer's recipe with an evaluation on so many public prompts, once."""
    section = {"data": {"path": IN_MEMORY}, "prompts": public, "declared_public": declared}
    values = recipe.model_dump() | {"evaluation": section}
    return recipe_from(values, (), source=type(config).__name__)


def _policy(args: Any) -> dict[str, Any]:
    given = args.model_init_kwargs or {}
    if not isinstance(given, Mapping):
        raise DprlhfError(f"model_init_kwargs: give a dictionary, not {given!r}")
    given = dict(given)
    unknown = sorted(set(given) - set(_MODEL_SETTINGS))
    if unknown:
        raise DprlhfError(
            f"model_init_kwargs: {unknown[0]!r} is not taken: use {', '.join(_MODEL_SETTINGS)}, or"
            " load the model yourself and pass the object"
        )
    if "torch_dtype" in given:
        given["dtype"] = given.pop("torch_dtype")
    if given.get("revision") == "main":  # TRL's command line says so of a local folder as well
        del given["revision"]
    if "dtype" in given:
        given["dtype"] = str(given["dtype"]).removeprefix("torch.")
    # Older versions of transformers do not have the newer name.
    if args.gradient_checkpointing or getattr(args, "activation_checkpointing", False):
        given["gradient_checkpointing"] = True
    template = getattr(args, "chat_template_kwargs", None) or {}
    return {
        "trust_remote_code": args.trust_remote_code,
        "chat_template_kwargs": template,
        **given,
    }


def _contribution(args: Any) -> dict[str, Any]:
    """Return how each user's contribution is computed and released."""
    settings = {
        "clip_norm": math.inf if args.is_baseline else args.privacy_clip_norm,
        "batch_size": args.per_device_train_batch_size,
    }
    given = args.privacy_subspace
    if given == AUTO:  # left to the public rows
        return settings
    if isinstance(given, str):  # it was set after the config was made, which reads JSON
        raise DprlhfError(f"privacy_subspace: give a mapping, not {given!r}")
    return {**settings, "subspace": given}


def _data(args: Any) -> dict[str, Any]:
    longest = args.privacy_max_prompt_tokens
    return {
        "path": IN_MEMORY,
        "prompt_column": "prompt",
        "user_column": args.privacy_unit,
        "max_prompts_per_user": args.privacy_max_prompts_per_user,
        **({} if longest is None else {"max_prompt_tokens": longest}),
    }


def _epochs(epochs: float) -> int:
    if epochs != round(epochs) or epochs < 1:
        raise DprlhfError(
            f"num_train_epochs={epochs:g}: every user takes part in the same whole number of"
            " rounds, at least 1; for fewer users, give a part of the dataset"
        )
    return round(epochs)


def _reward_range(args: Any) -> float:
    clip = getattr(args, "reward_clip_range", None)
    if clip is None:
        return float(args.privacy_reward_range)
    pair = isinstance(clip, Sequence) and len(clip) == 2
    if not pair or not all(isinstance(end, Real) for end in clip):
        raise DprlhfError(f"reward_clip_range: give two numbers, (low, high), not {clip!r}")
    low, high = clip
    own = args.privacy_reward_range
    if own not in (high, type(args).privacy_reward_range):
        raise DprlhfError(
            f"reward_clip_range=({low}, {high}) and privacy_reward_range={own}: both bound the"
            " rewards' sum; give one"
        )
    if low != -high:
        raise DprlhfError(
            f"reward_clip_range=({low}, {high}): the range is symmetric about 0 here: give"
            f" (-{max(abs(low), abs(high))}, {max(abs(low), abs(high))})"
        )
    return float(high)


def _update(args: Any) -> dict[str, Any]:
    if isinstance(args, PrivateRLOOConfig):
        return {"name": "pg", "baseline": "loo"}
    settings = update_settings(args.loss_type, args.scale_rewards)
    return settings | ({"clip_range": args.epsilon} if settings["name"] == "grpo" else {})


def _optimizer(args: Any) -> dict[str, Any]:
    optim, schedule = (
        str(getattr(args.optim, "value", args.optim)),
        str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
    )
    if not (optim == "sgd" or optim.startswith(("adamw_torch", "adamw_hf"))):
        raise DprlhfError(
            f"optim={optim!r}: the moments of few parameters need no such saving: give adamw_torch"
            " or sgd"
        )
    if schedule not in _SCHEDULES:
        raise DprlhfError(f"lr_scheduler_type={schedule!r}: use {', '.join(_SCHEDULES)}")
    return {
        "name": "sgd" if optim == "sgd" else "adam",
        **({} if args.learning_rate is None else {"learning_rate": args.learning_rate}),
        "schedule": _SCHEDULES[schedule],
    }


def _every(args: Any, rounds: int) -> int | None:
    if not _steps(args):
        return None
    steps = float(args.eval_steps or 0)
    return math.ceil(steps * rounds if steps < 1 else steps) or None  # a share, as in transformers


def _steps(args: Any) -> bool:
    return str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "steps"
