"""From TRL's settings to a recipe: what a private trainer starts is an ordinary run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, cast

from dprlhf.errors import DprlhfError
from dprlhf.recipe import IN_MEMORY, Recipe, make_recipe
from dprlhf.recipe.generation import rollout_settings
from dprlhf.recipe.trl_names import update_settings
from dprlhf.trl.config import PrivacyFields, PrivateRLOOConfig

_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
LONGEST_PROMPT = 512
"""The longest prompt of a long context, in tokens: TRL's ``max_prompt_length``, while it had it."""

_MODEL_SETTINGS = ("revision", "dtype", "torch_dtype", "attn_implementation", "trust_remote_code")


def recipe_of(
    config: PrivacyFields,
    *,
    model: str,
    adapter: dict[str, Any],
    rewards: Sequence[dict[str, Any]],
    users: int,
    public: int,
    processes: int,
    quantization: Mapping[str, str] | None = None,
    agent: dict[str, Any] | None = None,
) -> Recipe:
    """Return the recipe of a private trainer.

    Args:
        config: The trainer's config.
        model: Hub id or folder of the model; ``in-memory`` for one that has neither.
        adapter: The section ``policy.adapter``.
        rewards: The section ``rewards``.
        users: Number N of users.
        public: Number of public prompts for the evaluation; 0 without.
        processes: Number of processes of the launch.
        quantization: Keys of the section ``policy`` for a quantised base model.
        agent: The keys of ``rollout.agent`` for which there are objects; none for plain responses.

    Raises:
        DprlhfError: A setting has no meaning here, or a wrong value.
    """
    args: Any = config
    participations = args.privacy_participations
    if participations is None:
        participations = _epochs(args.num_train_epochs)
    rounds = _rounds(args, users, participations, processes)
    values: dict[str, Any] = {
        "policy": {
            **_policy(args),
            **(quantization or {}),
            "model_name_or_path": model,
            "adapter": adapter,
        },
        "data": _data(args),
        "rewards": list(rewards),
        "reward_range": _reward_range(args),
        "rollout": {**_rollout(args), "agent": _agent(args, agent)},
        "update": {
            **_update(args),
            "clip_norm": math.inf if config.is_baseline else args.privacy_clip_norm,
            "batch_size": args.per_device_train_batch_size,
            "subspace": _subspace(args),
        },
        "kl": {"beta": args.beta},
        "optimizer": _optimizer(args, rounds),
        "privacy": _privacy(args, participations),
        "rounds": rounds,
        "tracking": {"report_to": args.report_to, "project": args.project},
        "previous": [{"run": run} for run in args.privacy_previous],
        "seed": args.seed,
        "output_dir": args.output_dir,
    }
    if public:
        values["evaluation"] = _evaluation(args, public, rounds)
    elif _every(args, rounds) is not None:
        raise DprlhfError("eval_strategy='steps': give eval_dataset, public prompts to evaluate on")
    return make_recipe(values, source=type(config).__name__)


def _rollout(args: Any) -> dict[str, Any]:
    return {
        "responses": args.num_generations,
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "mask_truncated": args.mask_truncated_completions,
        "batch_size": "auto",
        "backend": "vllm" if args.use_vllm else "transformers",
        **rollout_settings(args.generation_kwargs or {}),  # they take precedence in TRL
    }


def _agent(args: Any, agent: dict[str, Any] | None) -> dict[str, Any] | None:
    if not agent:
        return None
    return {
        **agent,
        "max_tool_calling_iterations": getattr(args, "max_tool_calling_iterations", None),
    }


def with_evaluation(recipe: Recipe, config: PrivacyFields, public: int) -> Recipe:
    """Return a trainer's recipe with an evaluation on so many public prompts."""
    section = _evaluation(config, public, recipe.rounds)
    return make_recipe(recipe.model_dump() | {"evaluation": section}, source=type(config).__name__)


def _evaluation(args: Any, public: int, rounds: int) -> dict[str, Any]:
    return {
        "data": {"path": IN_MEMORY},
        "prompts": public,
        "every": _every(args, rounds),
        "declared_public": args.privacy_declared_public,
    }


def _rounds(args: Any, users: int, participations: int, processes: int) -> int:
    """Return ``max_steps``, or the steps that TRL would take on these users.

    TRL takes the same number of steps in each epoch, and so does an allocation, in which an epoch
    is a block of rounds; all blocks together have no more rounds than users.
    """
    if args.max_steps > 0:
        return int(args.max_steps)
    prompts = _prompts_a_step(args, processes)
    if args.privacy_partition == "random-allocation" and participations > 0:
        each = max(1, min(math.ceil(users / prompts), users // participations))
        return int(participations * each)
    return int(max(1, math.ceil(users * participations / prompts)))


def _prompts_a_step(args: Any, processes: int) -> int:
    """Return the number of prompts in a step of TRL's trainer with these settings."""
    responses = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    return max(1, int(responses // args.num_generations))


def first_line(config: PrivacyFields, recipe: Recipe, users: int, processes: int) -> str:
    """Return a line that says what a step is, for those who know TRL's.

    Args:
        config: The trainer's config.
        recipe: Its recipe.
        users: Number N of users.
        processes: Number of processes of the launch.
    """
    args: Any = config
    size = users * recipe.privacy.participations / recipe.rounds
    return (
        f"dprlhf: {recipe.rounds} steps (max_steps), each over about {size:.3g} of the {users}"
        f" users, with {args.num_generations} responses to a prompt; TRL would take"
        f" {_prompts_a_step(args, processes)} prompts a step. Of a longer prompt the last"
        f" {recipe.data.max_prompt_tokens} tokens are read (privacy_max_prompt_tokens)"
    )


FEW = 16
"""Users of a round below which a trainer warns, where the rounds follow from TRL's batch sizes."""


def small_rounds(config: PrivacyFields, recipe: Recipe, users: int) -> str | None:
    """Return a warning if TRL's batch sizes lead to rounds of few users, else None.

    Args:
        config: The trainer's config.
        recipe: Its recipe.
        users: Number N of users.
    """
    args: Any = config
    participations = recipe.privacy.participations
    uses = users * participations
    size = uses / recipe.rounds
    if args.max_steps > 0 or config.is_baseline or size >= FEW or uses < 2 * FEW:
        return None
    rounds = max(participations, min(FEW, uses // (2 * FEW)))
    rounds -= rounds % participations  # as an allocation needs it, and every partition takes
    if rounds >= recipe.rounds:
        return None
    return (
        f"dprlhf: {recipe.rounds} rounds of about {size:.3g} users each follow from"
        " per_device_train_batch_size, gradient_accumulation_steps and num_generations; the noise"
        " of a round hides what so few users say. Give max_steps, such as"
        f" max_steps={rounds} for about {uses / rounds:.3g} users in each"
    )


def long_warmup(config: PrivacyFields, recipe: Recipe) -> str | None:
    """Return a warning if the warm-up has more steps than the run has rounds, else None.

    Args:
        config: The trainer's config.
        recipe: Its recipe.
    """
    args: Any = config
    steps, rounds = args.warmup_steps, recipe.rounds
    if recipe.optimizer.warmup == 0 or steps < 1 or steps <= rounds:
        return None
    return (
        f"dprlhf: warmup_steps={steps:g} is more than the {rounds} rounds: the learning rate rises"
        f" over all of them and reaches learning_rate at the end (in TRL, {rounds}/{steps:g} of"
        " it). Give fewer steps, or a share of the rounds, such as warmup_steps=0.1"
    )


def short_steps(config: PrivacyFields, recipe: Recipe) -> str | None:
    """Return a warning if an adapter is trained with TRL's default learning rate, else None.

    Args:
        config: The trainer's config.
        recipe: Its recipe.
    """
    rate = recipe.optimizer.learning_rate
    usual = type(config).__dataclass_fields__["learning_rate"].default
    if rate != usual or recipe.policy.adapter.type == "full":
        return None
    return (
        f"dprlhf: learning_rate is TRL's default of {usual:g}, which is for all weights and many"
        f" steps: in {recipe.rounds} rounds it hardly moves an adapter. Give learning_rate, such as"
        " 1e-3"
    )


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
    template = args.chat_template_kwargs or {}
    return {
        "trust_remote_code": args.trust_remote_code,
        "chat_template_kwargs": template,
        **given,
    }


def _privacy(args: Any, participations: int) -> dict[str, Any]:
    return {
        "epsilon": args.privacy_epsilon,
        "noise_multiplier": args.privacy_noise_multiplier,
        "delta": args.privacy_delta,
        "partition": args.privacy_partition,
        "adjacency": args.privacy_adjacency,
        "participations": participations,
        "book": args.privacy_book,
    }


def _subspace(args: Any) -> dict[str, Any] | None:
    """Return the section ``update.subspace``, which needs other public rows than the evaluation.

    Raises:
        DprlhfError: It would take rows of ``eval_dataset``, all of which are evaluated.
    """
    given = args.privacy_subspace
    if isinstance(given, str):  # it was set after the config was made, which reads JSON
        raise DprlhfError(f"privacy_subspace: give a mapping, not {given!r}")
    if given is None or given.get("data"):
        return cast(dict[str, Any] | None, given)
    raise DprlhfError(
        "privacy_subspace: all rows of eval_dataset are evaluated, so its directions need other"
        " public prompts: add 'data': {'path': …}, a file or a dataset's name"
    )


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


def _optimizer(args: Any, rounds: int) -> dict[str, Any]:
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
    # transformers has no warm-up with "constant", whatever its steps.
    warmup = 0.0 if schedule == "constant" else float(args.warmup_steps)
    return {
        "name": "sgd" if optim == "sgd" else "adam",
        "learning_rate": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "schedule": _SCHEDULES[schedule],
        "warmup": warmup if warmup < 1 else min(warmup / rounds, 0.99),
    }


def _every(args: Any, rounds: int) -> int | None:
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "steps":
        return None
    steps = float(args.eval_steps or 0)
    return math.ceil(steps * rounds if steps < 1 else steps) or None  # a share, as in transformers
