"""Continuations of prompts by the base and the tuned policy of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dprlhf.api import recipe_in
from dprlhf.data.file_formats import MESSAGES
from dprlhf.data.public import in_memory_prompts, prompts_in
from dprlhf.data.spelling import storable
from dprlhf.errors import DprlhfError
from dprlhf.hub import hush_libraries
from dprlhf.rollout import public_sampling_settings, sample
from dprlhf.runs.checkpoint import last_checkpoint, load_tuned
from dprlhf.runs.folder import RunFolder
from dprlhf.training.processes import Processes
from dprlhf.training.setup import load_policy_of


def generate(
    folder: str | Path,
    prompts: Iterable[Any] | Path,
    seed: int = 0,
    *,
    max_new_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """Generate continuations of prompts with the base and with the tuned policy of a run.

    Args:
        folder: The run folder.
        prompts: Texts or conversations, in a list or a generator; or a file of them: one a line, or
            a ``.csv``, ``.json``, ``.jsonl`` or ``.parquet`` with the recipe's
            ``data.prompt_column``. Where that is ``messages``, a text is what a user says.
        seed: Seed of the sampling.
        max_new_tokens: Longest continuation, in tokens; None takes the recipe's
            ``rollout.max_new_tokens``.

    Returns:
        A dictionary for each prompt, with the keys ``prompt``, ``base`` and ``tuned``.

    Raises:
        DprlhfError: There is no policy or no such file, the prompts are no list, or the
            continuations exceed the context.
    """
    hush_libraries()
    given = prompts
    if isinstance(prompts, Iterable) and not isinstance(prompts, str):
        given = storable(list(prompts))  # a generator is read once
    # A text is a sequence of characters, and a conversation one of messages.
    wrong = isinstance(given, list) and any(isinstance(one, Mapping) for one in given)
    if wrong or not isinstance(given, list | Path):
        raise DprlhfError(
            "prompts: give a list of texts or conversations, [prompt] for a single one, or the"
            " pathlib.Path of a file"
        )
    run_folder = RunFolder(Path(folder))
    recipe = recipe_in(run_folder)
    if max_new_tokens is not None:
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise DprlhfError(f"max_new_tokens must be at least 1, not {max_new_tokens!r}")
        rollout = recipe.rollout.model_copy(update={"max_new_tokens": max_new_tokens})
        recipe = recipe.model_copy(update={"rollout": rollout})
    if isinstance(given, Path):
        given = prompts_in(given, recipe.data.prompt_column)
    checkpoint = last_checkpoint(run_folder)
    if checkpoint is None:
        raise DprlhfError(f"{folder}: no policy yet; finish the run with: dprlhf resume {folder}")
    policy = load_policy_of(recipe)
    load_tuned(checkpoint, policy)
    policy.model.to(Processes.connect().device)
    talks = recipe.data.prompt_column == MESSAGES
    asked = in_memory_prompts(
        [
            [{"role": "user", "content": one}] if talks and isinstance(one, str) else one
            for one in given
        ]
    )
    # The run's batches may have a thousand rows; these need what they fill.
    one = public_sampling_settings(recipe.rollout, len(asked), 1)
    one = one.model_copy(update={"backend": "transformers"})
    texts = {}
    for name in ("base", "tuned"):
        with policy.base() if name == "base" else contextlib.nullcontext():
            texts[name] = sample(
                policy,
                asked,
                one,
                key=bytes(32),
                context=("generate", seed),
                max_prompt_tokens=recipe.data.max_prompt_tokens,
            ).texts
    return [
        {"prompt": p, "base": b, "tuned": t}
        for p, b, t in zip(given, texts["base"], texts["tuned"], strict=True)
    ]
