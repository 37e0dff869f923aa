"""Everything between a recipe and its first round: data, plan, folder, ledger, policy, rewards."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dprlhf import recipe as settings
from dprlhf.boundary import open_private
from dprlhf.data.in_memory import R, Sources, rows_of
from dprlhf.data.public import evaluated, held_out, neutral_prompts, public_users
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError, InterruptedRunError
from dprlhf.hardware import native_dtype
from dprlhf.policies.causal_lm import (
    CausalLMPolicy,
    align_with_activations,
    load_policy,
)
from dprlhf.policies.optimizers import make_optimizer
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger
from dprlhf.privacy.partition import allocate
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.privacy.randomness import commitment
from dprlhf.recipe import (
    IN_MEMORY,
    AnyRecipe,
    Recipe,
    dump_recipe,
    experimental,
)
from dprlhf.recipe.adapters import FORMER_NAMES
from dprlhf.rewards import Reward as LoadedReward
from dprlhf.rewards import Scorer, Spread, check_reward, load_reward, spread_of
from dprlhf.rewards.isolation import captured
from dprlhf.rewards.private import rows_to_score
from dprlhf.rollout import Responses, resolve_batch_size, sample
from dprlhf.runs.earlier import Earlier, check_disjoint, read_earlier
from dprlhf.runs.folder import RunFolder, write_atomically
from dprlhf.runs.trackers import check_installed, tracked
from dprlhf.training.callbacks import as_functions
from dprlhf.training.processes import Processes
from dprlhf.training.progress import Progress
from dprlhf.training.trainer import Run
from dprlhf.updates.critic import Critic
from dprlhf.updates.privls.in_round import check_dimension
from dprlhf.updates.telemetry import TelemetryCoordinates
from dprlhf.updates.trust_region import clip_norm, fisher_trace_and_top

Callback = Callable[[dict[str, Any]], None] | Any
"""A function of a round's metrics, or a ``transformers.TrainerCallback``."""

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@contextlib.contextmanager
def prepared(
    recipe: Recipe,
    folder: RunFolder,
    sources: Sources,
    *,
    create: bool,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> Iterator[Run]:
    """Make everything that a run needs, and close it afterwards.

    What can fail on account of the recipe, the data, the policy or a reward fails before the run
    folder is made.

    Args:
        recipe: the settings; a new run writes them to its folder.
        folder: the run folder; with ``create`` it must not exist.
        sources: what the program holds in memory.
        create: start a new run; else continue the one in ``folder``.
        callbacks: called after every round.
        quiet: no progress bars.
    """
    processes = Processes.connect()
    if create:
        processes.on_main(folder.refuse_to_overwrite)
    parts = assemble(recipe, sources, processes, quiet=quiet)
    recipe, plan, users, policy = parts.recipe, parts.plan, parts.users, parts.policy
    with (
        opened(recipe, plan, folder, users, parts.earlier, processes, create=create) as held,
        os.fdopen(os.open(folder.secret / "reward-output.txt", _APPEND, 0o600), "a") as sink,
    ):
        run = Run(
            recipe=recipe,
            plan=plan,
            earlier=parts.earlier,
            folder=folder,
            key=held.key,
            processes=processes,
            users=users,
            allocation=allocate(plan, held.key),
            policy=policy,
            optimizer=make_optimizer(
                recipe.optimizer,
                policy.parameters.values(),
                plan.noise_std / plan.expected_batch_size,
            ),
            scorer=Scorer(parts.rewards, recipe.reward_range, sink=sink),
            public_prompts=parts.public_prompts,
            gate=held.gate,
            telemetry=TelemetryCoordinates.from_plan(
                plan, recipe.privacy.reward_share, recipe.reward_range
            ),
            critic=parts.critic,
            progress=Progress(
                recipe.rollout.responses,
                disable=quiet or not processes.main,
            ),
            callbacks=[
                *held.trackers,
                *as_functions(callbacks, folder.path, plan.rounds),
            ],
            spread=parts.spread,
        )
        yield run


@dataclass(frozen=True, repr=False)
class Opened:
    """What a run folder gives: its key, and on the main process the gate and the trackers."""

    key: bytes
    gate: Gate | None
    trackers: list[Callback]


@contextlib.contextmanager
def opened(
    recipe: AnyRecipe,
    plan: Plan,
    folder: RunFolder,
    users: Users,
    earlier: Earlier,
    processes: Processes,
    *,
    create: bool,
) -> Iterator[Opened]:
    """Make or open a run folder of any stage, its ledger and trackers, and close them afterwards.

    What goes wrong inside is told in one line that quotes no user.
    """
    key = processes.on_main(lambda: _key(folder, recipe, create=create))
    with _one_line_errors(folder), contextlib.ExitStack() as stack:
        gate, trackers = None, []
        if processes.main:
            for feature in experimental(recipe):
                print(f"dprlhf: experimental: {feature}", file=sys.stderr)
            ledger = _ledger(recipe, plan, folder, key, users, earlier)
            stack.callback(ledger.close)
            gate = Gate(plan, ledger, key)
            config = {**recipe.model_dump(mode="json"), "plan": plan.terms()}
            trackers = stack.enter_context(tracked(recipe.tracking, folder, config))
        yield Opened(key, gate, list(trackers))


@dataclass(frozen=True, repr=False)
class Parts:
    """What a run is made of before anything is written: settled settings, data, policy, rewards."""

    recipe: Recipe
    plan: Plan
    earlier: Earlier
    users: Users
    policy: CausalLMPolicy
    rewards: list[LoadedReward]
    spread: Spread
    public_prompts: Prompts | None
    critic: Critic | None


def assemble(recipe: Recipe, sources: Sources, processes: Processes, *, quiet: bool) -> Parts:
    """Load what a recipe names, and settle what it leaves to machine and data; writes nothing.

    Raises:
        DprlhfError: a setting, the data, the policy or a reward is wrong.
    """
    hush_libraries()
    check_installed(recipe.tracking.report_to)
    recipe = processes.on_main(lambda: resolve_dtype(recipe))
    earlier = processes.on_main(lambda: read_earlier(recipe))
    users = Users(rows_of(recipe.data, sources.prompts), recipe.data)
    processes.on_main(lambda: check_disjoint(recipe, users))
    plan = plan_of(recipe, users)
    policy = sources.policy or load(recipe)
    check_template(recipe.data, users, policy)
    check_dimension(recipe.update, policy.dimension)
    processes.place(policy)
    recipe = processes.on_main(lambda: _with_rollout(recipe, plan, policy, processes.count))
    public = public_users(recipe, sources.evaluation_prompts)
    if public is not None and recipe.policy.adapter.init == "public-activations":
        some = _leftover_responses(policy, recipe, public)
        align_with_activations(policy, some.tokens, some.mask, recipe.update.batch_size)
    recipe = processes.from_main(
        _settle_clip_norm(recipe, plan, policy, public, quiet=quiet or not processes.main)
    )
    plan = plan_of(recipe, users)
    rewards: Sequence[Any] = sources.rewards or [_loadable(r) for r in recipe.rewards]
    loaded = [load_reward(reward, device=processes.device) for reward in rewards]
    prompts = evaluated(recipe, public)
    spread = _check_rewards(loaded, policy, recipe, prompts or neutral_prompts())
    # Users must not be coupled, not even by rounding; and all processes score alike.
    rounded = processes.from_main(spread.rounded)
    loaded = [r.one_user_at_a_time() if r.name in rounded else r for r in loaded]
    critic = _critic(recipe, plan, policy, processes, prompts)
    return Parts(recipe, plan, earlier, users, policy, loaded, spread, prompts, critic)


def resolve_dtype(recipe: R) -> R:
    """Settle what the machine decides, so that a resumed run computes as it did before."""
    if recipe.trained.dtype != "auto":
        return recipe
    dtype = str(native_dtype()).removeprefix("torch.")
    trained = recipe.trained.model_copy(update={"dtype": dtype})
    return cast(R, recipe.model_copy(update={recipe.trained_key: trained}))


def _with_rollout(recipe: Recipe, plan: Plan, policy: CausalLMPolicy, processes: int) -> Recipe:
    rollout = resolve_batch_size(
        recipe.rollout,
        policy,
        rows=plan.expected_batch_size * recipe.rollout.responses / processes,
        max_prompt_tokens=recipe.data.max_prompt_tokens,
    )
    return recipe.model_copy(update={"rollout": rollout})


def plan_of(recipe: AnyRecipe, users: Users) -> Plan:
    """Build the plan of a recipe of any stage."""
    privacy = recipe.privacy
    return make_plan(
        users=users.count,
        rounds=recipe.rounds,
        delta=privacy.delta,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        clip_norm=recipe.update.radius,
        partition=privacy.partition,
        adjacency=privacy.adjacency,
        participations=privacy.participations,
        releases_per_round=recipe.update.releases,
        bands=privacy.bands,
    )


def _critic(
    recipe: Recipe,
    plan: Plan,
    policy: CausalLMPolicy,
    processes: Processes,
    public: Prompts | None,
) -> Critic | None:
    spec = recipe.update.noised_critic
    if spec is None:
        return None
    longest = recipe.data.max_prompt_tokens
    critic = Critic.from_plan(
        spec, plan, policy, recipe.reward_range, recipe.update.batch_size, longest
    )
    prompts = public.prompts if public is not None else []
    critic.fit_features(policy, policy.encode(prompts, longest))
    critic.load_state(processes.from_main(critic.state()))
    return critic


def _key(folder: RunFolder, recipe: AnyRecipe, *, create: bool) -> bytes:
    """Return the run's secret key; a new run makes its folder first."""
    if not create:
        return folder.open()
    key = folder.create()
    write_atomically(folder.recipe, dump_recipe(recipe))
    return key


def _ledger(
    recipe: AnyRecipe, plan: Plan, folder: RunFolder, key: bytes, users: Users, earlier: Earlier
) -> Ledger:
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
        hashes = io.BytesIO()
        np.save(hashes, open_private(users.identities()))
        write_atomically(folder.identities, hashes.getvalue(), mode=0o600)
        write_atomically(digest_file, digest, mode=0o600)
    elif held != digest:
        raise DprlhfError(
            f"data {recipe.data.path!r}: the users are not the ones that this run started with;"
            " some would be drawn twice. Start a new run"
        )
    return Ledger(
        folder.ledger,
        {
            **plan.terms(),
            **earlier.terms(),
            "unit": recipe.data.user_column,
            "recipe_sha256": _digest(recipe),
            "key_commitment": commitment(key),
        },
    )


def _digest(recipe: AnyRecipe) -> str:
    """Return a digest of what a run must not change.

    Newer keys that are not set are left out, and values have the name that they had first, so that
    the runs of earlier versions keep their digest.
    """
    newer = ("revision", "attn_implementation")
    former = {today: old for old, today in FORMER_NAMES.items()}

    def without_unset(values: Any) -> Any:
        if isinstance(values, dict):
            kept = {k: v for k, v in values.items() if v is not None or k not in newer}
            return {k: without_unset(v) for k, v in kept.items()}
        return [without_unset(v) for v in values] if isinstance(values, list) else values

    fixed = without_unset(recipe.model_dump(mode="json", exclude={"output_dir", "tracking"}))
    adapter = fixed[recipe.trained_key]["adapter"]
    adapter["type"] = former.get(adapter["type"], adapter["type"])
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def hush_libraries() -> None:
    """Leave the terminal to this project's own bars and lines."""
    import datasets
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def load(recipe: Recipe) -> CausalLMPolicy:
    """Load the recipe's policy, and check that prompts and responses fit into it."""
    policy = load_policy(recipe.policy, temperature=recipe.rollout.temperature, seed=recipe.seed)
    prompt, response = recipe.data.max_prompt_tokens, recipe.rollout.max_new_tokens
    policy.check_context_length(
        prompt + response,
        f"data.max_prompt_tokens {prompt} + rollout.max_new_tokens {response} is",
        recipe.policy.model_name_or_path,
    )
    return policy


def check_template(data: settings.Data, users: Users, policy: CausalLMPolicy) -> None:
    """Refuse conversations where the tokenizer cannot write them as text.

    Raises:
        DprlhfError: it has no chat template.
    """
    if users.conversations and policy.tokenizer.chat_template is None:
        raise DprlhfError(
            f"data.prompt_column {data.prompt_column!r} holds conversations, and the policy's"
            " tokenizer has no chat template: take an instruction-tuned model, or give text"
        )


def _loadable(spec: settings.Reward) -> settings.Reward:
    if spec.function == IN_MEMORY:
        raise DprlhfError("this run's reward was given in Python: give it again to resume()")
    return spec


def _leftover_responses(policy: CausalLMPolicy, recipe: Recipe, public: Users) -> Responses:
    """Sample one response to each of some public prompts that the evaluation leaves over."""
    one = recipe.rollout.model_copy(update={"responses": 1, "base_policy": "on-policy"})
    return sample(
        policy,
        held_out(recipe, public),
        one,
        key=bytes(32),
        context=("alignment", recipe.seed),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
    )


def _settle_clip_norm(
    recipe: Recipe, plan: Plan, policy: CausalLMPolicy, public: Users | None, *, quiet: bool
) -> Recipe:
    """Let the trust region decide the clip norm; the noise multiplier does not depend on it."""
    region = recipe.update.clip_norm
    if not isinstance(region, settings.TrustRegion):
        return recipe
    fisher = None
    if region.trust_region == "kl":
        assert public is not None
        responses = _leftover_responses(policy, recipe, public)
        fisher = fisher_trace_and_top(policy, responses, recipe.update.batch_size)
    norm = clip_norm(
        region,
        learning_rate=recipe.optimizer.learning_rate,
        noise_multiplier=plan.noise_multiplier,
        expected_batch_size=plan.expected_batch_size,
        dimension=policy.dimension,
        fisher=fisher,
    )
    if not quiet:
        of_fisher = f", tr F = {fisher[0]:.4g}, top eigenvalue {fisher[1]:.4g}" if fisher else ""
        print(
            f"clip norm {norm:.4g} from trust region {region.trust_region}, alpha {region.alpha:g},"
            f" beta {region.beta:g}: d = {policy.dimension:,}{of_fisher}"
        )
    update = recipe.update.model_copy(update={"clip_norm": norm})
    return recipe.model_copy(update={"update": update})


def _check_rewards(
    rewards: Sequence[LoadedReward], policy: CausalLMPolicy, recipe: Recipe, public: Prompts
) -> Spread:
    """Check on public prompts that no reward couples users, and see how the rewards lie there."""
    per_user = any(reward.per_user for reward in rewards)
    # Of one response alone, a reward that compares a user's responses would know nothing.
    responses = recipe.rollout.responses if per_user else 1
    sampled = sample(
        policy,
        public.first(max(2, 16 // responses)),
        recipe.rollout.model_copy(update={"responses": responses, "base_policy": "on-policy"}),
        key=bytes(32),
        context=("evaluation", recipe.seed),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
    )
    rows = rows_to_score(sampled)
    with captured(None):  # a reward that prints would spoil a plan that is printed as JSON
        reports = [
            check_reward(
                reward,
                rows.prompts,
                rows.completions,
                rows.columns,
                completion_ids=rows.completion_ids,
                users=sampled.user.tolist(),
                bound=recipe.reward_range,
            )
            for reward in rewards
        ]
    return spread_of(rewards, reports, recipe.reward_range)


@contextlib.contextmanager
def _one_line_errors(folder: RunFolder) -> Iterator[None]:
    """Keep what an unexpected error says out of sight: its text may quote a user."""
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
