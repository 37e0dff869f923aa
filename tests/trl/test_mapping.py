"""Each setting of TRL's that is honoured or mapped changes the recipe as the table says."""

import math
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
import trl

from dprlhf.recipe import Recipe
from dprlhf.training.build import plan_of
from dprlhf.trl import PrivateGRPOConfig, PrivateRLOOConfig
from dprlhf.trl.mapping import recipe_of


def made(cls: Any = PrivateGRPOConfig, users: int = 400, public: int = 0, **changes: Any) -> Recipe:
    budget = {} if "privacy_noise_multiplier" in changes else {"privacy_epsilon": 4.0}
    config = cls(**{"output_dir": "x", **budget, **changes})
    return recipe_of(
        config, model="gpt2", adapter={"type": "lora"}, rewards=[{"function": "in-memory"}],
        users=users, public=public,
    )  # fmt: skip


def value(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[int(part)] if isinstance(recipe, list) else getattr(recipe, part)
    return recipe


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"seed": 7}, "seed", 7),
        ({"learning_rate": 0.5}, "optimizer.learning_rate", 0.5),
        ({}, "optimizer.learning_rate", 0.02),
        ({"optim": "sgd", "public": 400}, "optimizer.learning_rate", 0.02),
        ({"max_completion_length": 9}, "rollout.max_new_tokens", 9),
        ({"num_generations": 4}, "rollout.responses", 4),
        ({"temperature": 0.5}, "rollout.temperature", 0.5),
        ({"top_k": 20}, "rollout.top_k", 20),
        ({"top_p": 0.9}, "rollout.top_p", 0.9),
        ({"min_p": 0.1}, "rollout.min_p", 0.1),
        ({}, "rollout.truncates", []),
        ({"mask_truncated_completions": True}, "rollout.mask_truncated", True),
        ({"generation_kwargs": {"stop_strings": ["a"]}}, "rollout.stop", ["a"]),
        ({"generation_kwargs": {"top_k": 3}, "top_k": 5}, "rollout.top_k", 3),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "policy.chat_template_kwargs",
            {"enable_thinking": False},
        ),
        ({"use_vllm": True}, "rollout.backend", "vllm"),
        ({"report_to": "wandb"}, "tracking.report_to", ["wandb"]),
        ({"trust_remote_code": True}, "policy.trust_remote_code", True),
        ({"max_steps": 12}, "rounds", 12),
        ({"users": 1000}, "rounds", 8),
        ({"users": 1000, "gradient_accumulation_steps": 10}, "rounds", 8),
        ({"users": 50, "num_train_epochs": 3}, "rounds", 6),
        ({"num_train_epochs": 2}, "privacy.participations", 2),
        ({"per_device_train_batch_size": 16}, "update.batch_size", 16),
        ({"optim": "sgd"}, "optimizer.name", "sgd"),
        ({"optim": "adamw_torch"}, "optimizer.name", "adam"),
        ({"lr_scheduler_type": "cosine"}, "optimizer.schedule", "cosine"),
        ({}, "optimizer.schedule", "constant"),
        ({"warmup_steps": 4}, "optimizer.schedule", "constant"),
        ({"beta": 0.1}, "kl.beta", 0.1),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, "policy.dtype", "bfloat16"),
        ({"model_init_kwargs": {"revision": "abc"}}, "policy.revision", "abc"),
        ({"gradient_checkpointing": True}, "policy.gradient_checkpointing", True),
        ({"activation_checkpointing": True}, "policy.gradient_checkpointing", True),
        ({}, "policy.gradient_checkpointing", False),
        ({"scale_rewards": "none"}, "update.scale_rewards", False),
        ({"scale_rewards": True}, "update.scale_rewards", True),
        ({"epsilon": 0.3}, "update.clip_range", 0.3),
        ({"loss_type": "dr_grpo"}, "update.name", "pg"),
        ({"loss_type": "dr_grpo"}, "update.baseline", "group"),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, "update.baseline", "loo"),
        ({"privacy_epsilon": math.inf}, "update.clip_norm", math.inf),
        ({"privacy_noise_multiplier": 0.0}, "update.clip_norm", math.inf),
        ({"privacy_clip_norm": 0.5}, "update.clip_norm", 0.5),
        ({"privacy_noise_multiplier": 2.0}, "privacy.noise_multiplier", 2.0),
        ({"privacy_delta": 1e-7}, "privacy.delta", 1e-7),
        ({"delta": 1.5}, "privacy.delta", 1e-5),
        ({"privacy_unit": "who"}, "data.user_column", "who"),
        ({"privacy_unit": ["who", "to"]}, "data.user_column", ["to", "who"]),
        ({"privacy_max_prompts_per_user": 3}, "data.max_prompts_per_user", 3),
        ({"privacy_max_prompt_tokens": 30}, "data.max_prompt_tokens", 30),
        ({"privacy_adjacency": "replace-one"}, "privacy.adjacency", "replace-one"),
        ({"privacy_partition": "poisson"}, "privacy.partition", "poisson"),
        ({"privacy_participations": 3}, "privacy.participations", 3),
        ({"privacy_reward_range": 2.0}, "reward_range", 2.0),
        ({"privacy_previous": ["a"]}, "previous.0.run", "a"),
        ({"privacy_book": "book.db"}, "privacy.book", "book.db"),
        ({"public": 5}, "evaluation.prompts", 256),
        ({"public": 400}, "evaluation.prompts", 128),
        ({"public": 12, "privacy_subspace": {"rank": 2}}, "evaluation.prompts", 6),
        ({"public": 400}, "update.subspace.rank", 16),
        ({"public": 400}, "optimizer.name", "normalized-sgd"),
        ({"public": 400, "learning_rate": 0.1}, "update.subspace", None),
        ({"public": 400, "privacy_subspace": None}, "update.subspace", None),
        ({"public": 5, "eval_strategy": "steps", "eval_steps": 3}, "evaluation.every", 3),
        (
            {"public": 5, "eval_strategy": "steps", "eval_steps": 0.25, "max_steps": 10},
            "evaluation.every",
            3,
        ),
        ({"public": 5}, "evaluation.every", None),
    ],
)
def test_a_setting_changes_the_recipe(changes: dict[str, Any], key: str, expected: Any) -> None:
    assert value(made(**changes), key) == expected


def test_rloo_is_the_policy_gradient_with_the_other_responses_as_baseline() -> None:
    recipe = made(PrivateRLOOConfig, reward_clip_range=(-2.0, 2.0))
    assert (recipe.update.name, value(recipe, "update.baseline")) == ("pg", "loo")
    assert recipe.reward_range == 2.0
    assert recipe.kl.beta == PrivateRLOOConfig(output_dir="x", privacy_epsilon=1.0).beta == 0


@pytest.mark.parametrize("public", [0, 80])
def test_a_subspace_has_its_own_prompts(public: int) -> None:
    subspace = {"data": {"path": "public.txt"}}
    found = made(public=public, privacy_subspace=subspace).update.subspace
    assert found.model_dump(exclude_defaults=True).keys() == subspace.keys()


@pytest.mark.parametrize(
    ("users", "epochs", "partition"),
    [(50, 3, "random-allocation"), (7, 2, "random-allocation"), (1000, 3, "poisson")],
)
def test_the_partition_takes_the_default_rounds(users: int, epochs: int, partition: str) -> None:
    changes = {"num_train_epochs": epochs, "privacy_partition": partition}
    recipe = made(users=users, privacy_epsilon=math.inf, **changes)
    assert plan_of(recipe, users).rounds == recipe.rounds


LENGTHS, ADVANTAGES = torch.tensor([2, 5, 3]), torch.tensor([1.5, -0.5, 0.7])


def weights_in_trl(**settings: Any) -> torch.Tensor:
    """The weight of each token's ∇ log π in a loss of TRL's, on-policy, ``[responses, tokens]``."""
    args = trl.GRPOConfig(output_dir="x", use_cpu=True, bf16=False, **settings)
    logps = torch.linspace(-3, -1, 15, dtype=torch.float64).view(3, 5).requires_grad_()
    mask = (torch.arange(5) < LENGTHS[:, None]).double()
    own = mock.MagicMock(
        args=args, beta=0.0, use_vllm=False, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, epsilon_low=args.epsilon,
        epsilon_high=args.epsilon_high or args.epsilon, max_completion_length=5,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **{n: getattr(trl.GRPOTrainer, n) for n in ("get_gamma_weights", "get_off_policy_mask")},
        **{n: getattr(args, n) for n in (
            "loss_type", "importance_sampling_level", "top_entropy_quantile",
            "off_policy_mask_threshold",
        )},
    )  # fmt: skip
    args.steps_per_generation = own.accelerator.num_processes = 1
    own.accelerator.gather = own.accelerator.reduce = lambda value, **_: value
    own._get_per_token_logps_and_entropies.return_value = logps, torch.ones(3, 5), None
    ids = torch.ones(3, 5, dtype=torch.long)
    given = {"prompt_ids": ids, "completion_ids": ids, "prompt_mask": ids, "completion_mask": mask}
    inputs = {**given, "advantages": ADVANTAGES.double(), "num_items_in_batch": mask.sum()}
    trl.GRPOTrainer._compute_loss(own, None, inputs).backward()
    assert logps.grad is not None
    return -logps.grad


@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_type": loss} for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "vespo")),
        *({"loss_type": "luspo", "importance_sampling_level": x} for x in ("token", "sequence")),
        {"loss_type": "sapo", "sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.5},
        {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 4.0},
        {"loss_type": "grpo", "delta": 1.5, "epsilon_high": 0.3, "off_policy_mask_threshold": 0.1},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ],
)
def test_an_on_policy_loss_of_trl_weighs_tokens_as_its_update_does(settings: Any) -> None:
    """But for a constant: what TRL divides by the batch's tokens is divided by nothing here."""
    mask = (torch.arange(5) < LENGTHS[:, None]).double()
    own = ADVANTAGES.double()[:, None] * mask
    if made(**settings).update.name == "grpo":
        own /= LENGTHS[:, None]
    theirs = weights_in_trl(**settings)
    torch.testing.assert_close(theirs / theirs.norm(), own / own.norm())
