"""Train, resume, generate: the three calls behind the command line and the Python API."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dprlhf import recipe as settings
from dprlhf.boundary import open_private
from dprlhf.card import model_card, privacy_card
from dprlhf.errors import DprlhfError, InterruptedRunError
from dprlhf.evaluate import Evaluated, estimate, evaluate
from dprlhf.partition import allocate
from dprlhf.plan import Plan, make_plan
from dprlhf.policies.causal_lm import CausalLMPolicy, align_with_activations, load_policy
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.randomness import commitment
from dprlhf.processes import Processes
from dprlhf.progress import Progress
from dprlhf.recipe import IN_MEMORY, Recipe, dump_recipe, load_recipe, make_recipe
from dprlhf.rewards import Scorer, check_reward, load_reward
from dprlhf.rollout import sample
from dprlhf.run_folder import RunFolder, replaced_folder, write_atomically, write_json
from dprlhf.telemetry import TelemetryCoordinates
from dprlhf.trainer import Result, Run, evaluate_policy, run_rounds
from dprlhf.users import Prompts, Users, load_rows, rows_from

Reward = Callable[..., Any]
Callback = Callable[[dict[str, Any]], None]

_ALIGNMENT_PROMPTS = 64

# Stand-ins for the contract check where a recipe names no public prompts.
_NEUTRAL_PROMPTS = [
    "The weather today is",
    "My favourite meal to cook at home is",
    "In the morning she walked to the station and",
    "The report describes three ways in which",
]


def train(
    recipe: Recipe | str | Path | None = None,
    *,
    prompts: Sequence[Any] | Any | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    evaluation_prompts: Sequence[Any] | Any | None = None,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **flat: Any,
) -> Result:
    """Tune a policy on private prompts.

    Args:
        recipe: a :class:`~dprlhf.recipe.Recipe`, a YAML file, or None to build one from ``flat``.
        prompts: private prompts in memory: a list of texts, conversations or rows, or a
            ``datasets.Dataset``. Replaces the recipe's data.
        reward: a callable or several with TRL's signature. Replaces the recipe's rewards.
        evaluation_prompts: public prompts in memory, for the reward before and after.
        overrides: ``section.key=value`` texts, applied to a YAML file.
        output_dir: the run folder; must not exist.
        callbacks: called after every round with its public and released metrics.
        quiet: no progress bars.
        **flat: without a recipe, settings by name: ``model``, ``epsilon``, ``rounds``, or any key
            with ``__`` for the dot (``update__clip_norm=0.5``).

    Returns:
        The tuned policy, the guarantee and the public rewards.

    Raises:
        DprlhfError: a setting, the data or a reward is wrong; the message names it.
    """
    recipe = _recipe(recipe, overrides, flat, prompts, reward, evaluation_prompts)
    if output_dir is not None:
        recipe = recipe.model_copy(update={"output_dir": str(output_dir)})
    _hush_libraries()
    processes = Processes.connect()
    folder = RunFolder(Path(processes.from_main(recipe.output_dir or _new_folder())))
    sources = _Sources(prompts, reward, evaluation_prompts)
    users = _users(recipe, sources)
    plan = _plan(recipe, users)
    key = _share_key(processes, folder, recipe, create=True)
    with _one_line_errors(folder):
        return _run(recipe, plan, folder, key, processes, users, sources, callbacks, quiet)


def resume(
    folder: str | Path,
    *,
    prompts: Sequence[Any] | Any | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    evaluation_prompts: Sequence[Any] | Any | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> Result:
    """Continue a run that was interrupted, with the same recipe and the same users.

    Rounds that were charged stay spent: their users are never drawn again.

    Raises:
        DprlhfError: the folder is no run, was altered, or its data or recipe changed.
    """
    run_folder = RunFolder(Path(folder))
    _hush_libraries()
    processes = Processes.connect()
    if not run_folder.recipe.is_file():
        raise DprlhfError(f"{folder}: not a run folder (there is no recipe.yaml)")
    recipe = load_recipe(run_folder.recipe)
    sources = _Sources(prompts, reward, evaluation_prompts)
    users = _users(recipe, sources)
    plan = _plan(recipe, users)
    key = _share_key(processes, run_folder, recipe, create=False)
    with _one_line_errors(run_folder):
        return _run(recipe, plan, run_folder, key, processes, users, sources, callbacks, quiet)


def generate(folder: str | Path, prompts: Sequence[str], seed: int = 0) -> list[dict[str, str]]:
    """Continue prompts with the base and with the tuned policy of a run.

    Returns:
        For each prompt: ``prompt``, ``base`` and ``tuned``.
    """
    run_folder = RunFolder(Path(folder))
    if not run_folder.recipe.is_file():
        raise DprlhfError(f"{folder}: not a run folder (there is no recipe.yaml)")
    recipe = load_recipe(run_folder.recipe)
    policy = _load(recipe)
    state = run_folder.checkpoint / "policy.safetensors"
    if not state.is_file():
        raise DprlhfError(f"{folder}: no policy yet; finish the run with: dprlhf resume {folder}")
    from safetensors.torch import load_file

    policy.load_state(load_file(state))
    asked = _in_memory_prompts(prompts)
    one = recipe.rollout.model_copy(update={"responses": 1, "base_policy": "on-policy"})
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
        for p, b, t in zip(prompts, texts["base"], texts["tuned"], strict=True)
    ]


class _Sources:
    """What the program holds in memory in place of the recipe's data and rewards."""

    def __init__(self, prompts: Any, reward: Any, evaluation_prompts: Any) -> None:
        if prompts is not None and evaluation_prompts is prompts:
            raise DprlhfError(
                "evaluation_prompts are the private prompts: evaluation writes prompts and rewards"
                " in the open, so it needs public ones"
            )
        self.prompts = prompts
        self.evaluation_prompts = evaluation_prompts
        self.rewards: list[Reward] | None = None
        if reward is not None:
            self.rewards = [reward] if callable(reward) else list(reward)


def _recipe(
    recipe: Recipe | str | Path | None,
    overrides: Sequence[str],
    flat: dict[str, Any],
    prompts: Any,
    reward: Any,
    evaluation_prompts: Any,
) -> Recipe:
    if isinstance(recipe, str | Path):
        if flat:
            raise DprlhfError(
                f"unknown argument '{next(iter(flat))}': with a recipe, use overrides"
            )
        return load_recipe(recipe, overrides)
    if isinstance(recipe, Recipe):
        return recipe
    values: dict[str, Any] = {}
    short = {
        "model": "policy__model_name_or_path",
        "epsilon": "privacy__epsilon",
        "delta": "privacy__delta",
        "learning_rate": "optimizer__learning_rate",
    }
    for name, value in flat.items():
        *parents, last = short.get(name, name).split("__")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    if prompts is not None:
        values.setdefault("data", {}).setdefault("path", IN_MEMORY)
    if reward is not None:
        values.setdefault("rewards", [{"function": IN_MEMORY}])
    if evaluation_prompts is not None:
        public = values.setdefault("evaluation", {}).setdefault("data", {})
        public.setdefault("path", IN_MEMORY)
    return make_recipe(values, source="train")


def _users(recipe: Recipe, sources: _Sources) -> Users:
    return Users(_rows(recipe.data, sources.prompts), recipe.data)


def _rows(data: settings.Data, given: Any) -> Any:
    if given is not None:
        return rows_from(given, data.prompt_column)
    if data.path == IN_MEMORY:
        raise DprlhfError("this run's prompts were given in Python: give them again to resume()")
    return load_rows(data)


def _plan(recipe: Recipe, users: Users) -> Plan:
    privacy = recipe.privacy
    return make_plan(
        users=users.count,
        rounds=recipe.rounds,
        delta=privacy.delta,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        clip_norm=recipe.update.clip_norm,
        partition=privacy.partition,
        adjacency=privacy.adjacency,
        participations=privacy.participations,
    )


def _new_folder() -> str:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"runs/{stamp}"


def _share_key(processes: Processes, folder: RunFolder, recipe: Recipe, *, create: bool) -> bytes:
    """Make or read the secret key on the main process, and give it to all."""
    key, problem = None, None
    if processes.main:
        try:
            key = folder.create() if create else folder.open()
            if create:
                write_atomically(folder.recipe, dump_recipe(recipe))
        except DprlhfError as error:
            problem = error
    key, problem = processes.from_main((key, problem))
    if problem is not None:
        raise problem
    assert key is not None
    return bytes(key)


def _run(
    recipe: Recipe,
    plan: Plan,
    folder: RunFolder,
    key: bytes,
    processes: Processes,
    users: Users,
    sources: _Sources,
    callbacks: Sequence[Callback],
    quiet: bool,
) -> Result:
    ledger = _ledger(recipe, plan, folder, key, users) if processes.main else None
    try:
        policy = _load(recipe)
        policy.model.to(processes.device)
        public = _public_users(recipe, sources)
        if public is not None and recipe.policy.adapter.init == "public-activations":
            _align(policy, recipe, public)
        rewards: Sequence[Any] = sources.rewards or [_loadable(r) for r in recipe.rewards]
        with open(folder.secret / "reward-output.txt", "a") as sink:
            scorer = Scorer(
                [load_reward(reward) for reward in rewards], recipe.reward_range, sink=sink
            )
            run = Run(
                recipe=recipe,
                plan=plan,
                folder=folder,
                key=key,
                processes=processes,
                users=users,
                allocation=allocate(plan, key),
                policy=policy,
                optimizer=_optimizer(recipe.optimizer, policy),
                scorer=scorer,
                public_prompts=_evaluation_prompts(recipe, public),
                ledger=ledger,
                telemetry=TelemetryCoordinates.from_plan(
                    plan, recipe.privacy.reward_share, recipe.reward_range
                ),
                progress=Progress(
                    recipe.rollout.responses,
                    plan.divisor * recipe.rollout.responses / processes.count,
                    disable=quiet or not processes.main,
                ),
                callbacks=list(callbacks),
            )
            return _execute(run)
    finally:
        if ledger is not None:
            ledger.close()


def _execute(run: Run) -> Result:
    card = privacy_card(run.recipe, run.plan, run.policy.dimension)
    _check_rewards(run)
    if run.processes.main:
        write_json(run.folder.privacy, card)
    before = _evaluate(run, "evaluation before", base=True)
    try:
        run_rounds(run)
    finally:
        run.progress.close()
    after = _evaluate(run, "evaluation after", base=False)
    samples = _samples(before, after)
    if run.processes.main:
        with replaced_folder(run.folder.policy) as fresh:
            run.policy.save(fresh)
            (fresh / "README.md").write_text(model_card(run.recipe, card))
        if after is not None:
            write_json(run.folder.samples, samples)
    run.processes.wait()
    return Result(
        folder=run.folder,
        plan=run.plan,
        before=before.estimate if before else None,
        after=after.estimate if after else None,
        difference=estimate(after.rewards - before.rewards) if before and after else None,
        samples=samples,
        policy=run.policy,
    )


def _ledger(recipe: Recipe, plan: Plan, folder: RunFolder, key: bytes, users: Users) -> Ledger:
    # The digest of the data stays in secret/: published, it would confirm a guess at the data.
    digest_file = folder.secret / "data-digest"
    digest = open_private(users.digest())
    held = digest_file.read_text() if digest_file.exists() else None
    if (held is None) == folder.ledger.exists():
        lost = digest_file if held is None else folder.ledger
        raise DprlhfError(
            f"{lost}: missing; this run cannot be continued, because what it spent is no longer"
            " known. Start a new run"
        )
    if held is None:
        write_atomically(digest_file, digest, mode=0o600)
    elif held != digest:
        raise DprlhfError(
            f"data {recipe.data.path!r}: the users are not the ones that this run started with;"
            " some would be drawn twice. Start a new run"
        )
    fixed = recipe.model_dump(mode="json", exclude={"output_dir"})
    text = json.dumps(fixed, sort_keys=True)
    return Ledger(
        folder.ledger,
        {
            **plan.terms(),
            "recipe_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "key_commitment": commitment(key),
        },
    )


def _hush_libraries() -> None:
    """Leave the terminal to this project's own bars and lines."""
    import datasets
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _load(recipe: Recipe) -> CausalLMPolicy:
    policy = load_policy(recipe.policy, temperature=recipe.rollout.temperature, seed=recipe.seed)
    room = getattr(policy.model.config, "max_position_embeddings", math.inf)
    prompt, response = recipe.data.max_prompt_tokens, recipe.rollout.max_new_tokens
    if prompt + response > room:
        raise DprlhfError(
            f"data.max_prompt_tokens {prompt} + rollout.max_new_tokens {response} is more than the"
            f" {room} positions of {recipe.policy.model_name_or_path}"
        )
    return policy


def _loadable(spec: settings.Reward) -> settings.Reward:
    if spec.function == IN_MEMORY:
        raise DprlhfError("this run's reward was given in Python: give it again to resume()")
    return spec


def _optimizer(spec: settings.Optimizer, policy: CausalLMPolicy) -> torch.optim.Optimizer:
    parameters = list(policy.parameters.values())
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=spec.learning_rate, momentum=spec.momentum)
    return torch.optim.Adam(parameters, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps)


def _public_users(recipe: Recipe, sources: _Sources) -> Users | None:
    if recipe.evaluation is None:
        return None
    data = recipe.evaluation.data
    rows = _rows(data, sources.evaluation_prompts)
    return Users(rows, data.model_copy(update={"user_column": None}))


def _align(policy: CausalLMPolicy, recipe: Recipe, public: Users) -> None:
    """Start the adapter from public activations, on prompts that the evaluation leaves over."""
    assert recipe.evaluation is not None
    first = min(recipe.evaluation.prompts, public.count - 1)
    left = public.select(np.arange(first, min(first + _ALIGNMENT_PROMPTS, public.count)))
    one = recipe.rollout.model_copy(update={"responses": 1, "base_policy": "on-policy"})
    responses = sample(
        policy,
        left,
        one,
        key=bytes(32),
        context=("alignment", recipe.seed),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
    )
    align_with_activations(policy, responses.tokens, responses.mask, recipe.update.batch_size)


def _evaluation_prompts(recipe: Recipe, public: Users | None) -> Prompts | None:
    if public is None or recipe.evaluation is None:
        return None
    return public.select(np.arange(min(recipe.evaluation.prompts, public.count)))


def _in_memory_prompts(prompts: Sequence[Any]) -> Prompts:
    return Prompts(
        list(prompts), np.arange(len(prompts)), np.zeros(len(prompts), dtype=np.int64), {}
    )


def _check_rewards(run: Run) -> None:
    """Check on public prompts that no reward couples users."""
    public = run.public_prompts or _in_memory_prompts(_NEUTRAL_PROMPTS)
    few = Prompts(
        public.prompts[:16],
        public.users[:16],
        public.slots[:16],
        {name: values[:16] for name, values in public.columns.items()},
    )
    evaluated = evaluate(
        run.policy,
        run.scorer,
        few,
        run.recipe.rollout,
        seed=run.recipe.seed,
        max_prompt_tokens=run.recipe.data.max_prompt_tokens,
    )
    texts = evaluated.responses.texts
    chat = [not isinstance(p, str) for p in few.prompts]
    completions = [
        [{"role": "assistant", "content": t}] if c else t for t, c in zip(texts, chat, strict=True)
    ]
    for reward in run.scorer.rewards:
        check_reward(reward, few.prompts, completions, few.columns, bound=run.recipe.reward_range)


def _evaluate(run: Run, description: str, *, base: bool) -> Evaluated | None:
    if run.public_prompts is None:
        return None
    return evaluate_policy(run, description, base=base)


def _samples(before: Evaluated | None, after: Evaluated | None) -> list[dict[str, Any]]:
    if before is None or after is None:
        return []
    return [
        {
            "prompt": prompt,
            "before": old,
            "reward_before": float(r_old),
            "after": new,
            "reward_after": float(r_new),
        }
        for prompt, old, r_old, new, r_new in zip(
            after.responses.prompts.prompts,
            before.responses.texts,
            before.rewards,
            after.responses.texts,
            after.rewards,
            strict=True,
        )
    ]


@contextlib.contextmanager
def _one_line_errors(folder: RunFolder):  # type: ignore[no-untyped-def]
    """Keep what an unexpected error says out of sight: its text may quote a user."""
    import traceback

    try:
        yield
    except DprlhfError:
        raise
    except KeyboardInterrupt:
        raise InterruptedRunError(
            f"interrupted at a safe point; continue with: dprlhf resume {folder.path}"
        ) from None
    except Exception as error:
        report = folder.secret / "error.txt"
        write_atomically(report, traceback.format_exc(), mode=0o600)
        raise DprlhfError(
            f"{type(error).__name__} during the run; its text may quote a user, so it is in"
            f" {report}; continue with: dprlhf resume {folder.path}"
        ) from None


__all__ = ["generate", "resume", "train"]
