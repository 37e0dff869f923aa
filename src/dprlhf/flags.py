"""Command-line flags that read like TRL's, as overrides of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dprlhf.errors import DprlhfError, nearest

KEYS = {
    "model_name_or_path": "policy.model_name_or_path",
    "trust_remote_code": "policy.trust_remote_code",
    "dtype": "policy.dtype",
    "torch_dtype": "policy.dtype",
    "lora_r": "policy.adapter.rank",
    "lora_alpha": "policy.adapter.alpha",
    "lora_target_modules": "policy.adapter.target_modules",
    "dataset_name": "data.path",
    "dataset_config": "data.name",
    "dataset_train_split": "data.split",
    "max_prompt_length": "data.max_prompt_tokens",
    "num_generations": "rollout.responses",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "per_device_train_batch_size": "update.batch_size",
    "beta": "kl.beta",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_ratio": "optimizer.warmup",
    "report_to": "tracking.report_to",
    "seed": "seed",
}
"""TRL's names (GRPOConfig, ModelConfig, ScriptArguments) and the recipe's keys."""


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """Return ``section.key=value`` texts; ``--name value`` and ``--name=value`` become such texts.

    >>> overrides_of(["rounds=4", "--model_name_or_path", "gpt2", "--learning-rate=1e-3"])
    ['rounds=4', 'policy.model_name_or_path=gpt2', 'optimizer.learning_rate=1e-3']

    Raises:
        DprlhfError: a flag is unknown, or has no value.
    """
    left = iter(arguments)
    return [_override(argument, left) if argument[:2] == "--" else argument for argument in left]


def _override(flag: str, left: Iterator[str]) -> str:
    name, equals, value = flag[2:].partition("=")
    name = name.replace("-", "_")
    if name not in KEYS:
        near = nearest(name, KEYS)
        hint = f"; did you mean '--{near}'?" if near else "; write section.key=value"
        raise DprlhfError(f"unknown flag '{flag.partition('=')[0]}'{hint}")
    if not equals:
        value = next(left, "")
        if not value or value.startswith("--"):
            raise DprlhfError(f"flag '{flag}' needs a value")
    return f"{KEYS[name]}={value}"
