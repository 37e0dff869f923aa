"""TRL's names of a recipe's keys in errors, for people who wrote a trainer and no recipe."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from dprlhf.errors import DprlhfError

NAMES = {
    "data.max_prompt_tokens": "privacy_max_prompt_tokens",
    "data.max_prompts_per_user": "privacy_max_prompts_per_user",
    "data 'in-memory'": "train_dataset",
    "evaluation.data in-memory": "eval_dataset",
    "evaluation.data": "eval_dataset",
    "kl.beta": "beta",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.warmup": "warmup_steps",
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
