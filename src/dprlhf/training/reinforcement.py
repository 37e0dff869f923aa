"""Private updates: the stage of ``dprlhf train``.

A round samples responses to its users' prompts, scores them, and hands both to one of the updates
in :mod:`dprlhf.updates`, which clips, releases through the gate, and moves the policy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dprlhf.boundary import Private
from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.data.public import evaluated, neutral_prompts
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import DprlhfError
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.policies.kept import Keep
from dprlhf.policies.refusals import refuse_foreign_hooks
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import PPO, Recipe
from dprlhf.rewards import LoadedReward, RewardSummary, Scorer, Scores, load_rewards
from dprlhf.rewards.isolation import captured
from dprlhf.rewards.reward import RoundState
from dprlhf.rewards.scoring import score_private
from dprlhf.rollout import Responses, most_kept, sample_responses
from dprlhf.runs.checkpoint import Stateful
from dprlhf.runs.folder import JsonLines, RunFolder, append_secret, write_json
from dprlhf.training.evaluate import (
    Comparison,
    Evaluated,
    PolicyEstimate,
    RewardEstimate,
    as_metrics,
    compared,
    comparison_metrics,
    drift_warnings,
    evaluate,
    figures,
    first_samples,
    samples,
)
from dprlhf.training.made_up_rounds import Shapes
from dprlhf.training.run import Batch, Outcome, PreparedRun, Run, Summarised, summary_of
from dprlhf.training.setup import (
    call_size,
    check_declared,
    check_rewards,
    load_policy_of,
    start_adapter,
    with_batch_size,
    with_prompt_width,
    with_sampling,
)
from dprlhf.training.timing import seconds_a_response, seconds_a_round
from dprlhf.updates import PrivateRound, find_update
from dprlhf.updates.round import subtract_kl
from dprlhf.updates.telemetry import ReleasedReward, TelemetryCoordinates, ValidShare

if TYPE_CHECKING:
    from dprlhf.agents import AgentSampler
    from dprlhf.training.guidance import Guidance

NEAR_ZERO, HEALTHY = 0.1, 0.9
"""Shares of users with valid rewards below which a run stops, and below which it warns."""

_REHEARSED = 2
"""Public prompts on which the evaluation at the end is tried before the first round."""


@dataclass(frozen=True, repr=False)
class Result(Summarised):
    """The result of a finished run of private updates.

    Attributes:
        folder: The run folder.
        plan: The privacy plan, with the guarantee.
        before: Mean reward of the base model on the public prompts, with what else was measured on
            its responses; None without evaluation.
        after: The same of the tuned policy, on the same prompts.
        difference: The mean of after − before on the same prompts and draws.
        compared: Difference and win rate against the base model, under ``reward``.
        samples: Public prompts with both continuations and their rewards.
        policy: The tuned policy.
    """

    folder: RunFolder
    plan: Plan
    before: PolicyEstimate | None
    after: PolicyEstimate | None
    difference: RewardEstimate | None
    samples: list[dict[str, Any]]
    policy: CausalLMPolicy
    compared: Mapping[str, Comparison] = field(default_factory=dict)

    @property
    def summary(self) -> list[tuple[str, str]]:
        """The run folder, the guarantee, and the public reward before and after."""
        means = {"public reward": (self.before, self.after)} if self.before else {}
        return summary_of(self.folder, self.plan, means)


class Reinforcement:
    """The stage of private updates; see :class:`dprlhf.training.run.Stage` for its methods."""

    rewards: list[LoadedReward]
    spread: RewardSummary  # Summary of the distribution of rewards of responses to public prompts
    warnings: list[str]  # From the check of the rewards on public prompts
    scorer: Scorer  # The weighted sum of the rewards, clipped to ± reward_range
    known: Prompts  # The public prompts, or without them neutral ones in the form of the users'
    shapes: Shapes
    rows_a_user: int  # The number of responses to a user's prompt

    # The coordinates that carry the mean reward in each round's first release
    telemetry: TelemetryCoordinates

    def __init__(self, recipe: Recipe, sources: InMemoryInputs) -> None:
        self.recipe = recipe
        self.public: Prompts | None = None
        self.guidance: Guidance | None = None
        self.stateful: dict[str, Stateful] = {}
        self.watch: Callable[[PrivateRound], None] | None = None  # an audit's, before the update
        self.keep: Keep | None = None
        self.timing: dict[str, float] = {}
        self.agent: AgentSampler | None = None
        self._sources = sources
        self._valid = ValidShare()
        self.warned = False  # of a low share of valid rewards
        self._last_reward: ReleasedReward | None = None
        self._before: Evaluated | None = None

    # --- before the run ---------------------------------------------------------------------

    def load_policy(self, public: Users | None) -> CausalLMPolicy:
        """Return the program's own policy, or load the recipe's."""
        policy: CausalLMPolicy
        if self._sources.policy is None:
            policy = load_policy_of(self.recipe)
        else:
            policy = with_sampling(self._sources.policy, self.recipe)
        policy.tools, policy.sampler, spec, tools = (), None, self.recipe.rollout.agent, 0
        if spec is not None:
            from dprlhf.agents import load_sampler

            self.agent = load_sampler(spec, **self._sources.agent)
            tools = self.agent.attach(policy)
        self.recipe = with_prompt_width(self.recipe, policy, public, tools)
        return policy

    def check_rows(self, rows: Any) -> None:
        """Check nothing: an unreadable prompt is found as it is read, and contributes nothing."""

    def check_policy(self, users: Users, policy: CausalLMPolicy) -> None:
        """Refuse a tokenizer without a template, or a policy too large for the recipe's oracle."""
        if users.conversations:
            from dprlhf.training.tasks import check_template

            check_template(self.recipe.data, users, policy)
        if self.agent is not None and "chat_template_kwargs" in users.column_names:
            raise DprlhfError(
                "rollout.agent: conversations of several turns have one template for all rows: set"
                " policy.chat_template_kwargs in place of the column chat_template_kwargs"
            )
        if self.agent is not None:
            self.agent.agent.check_columns(users.column_names)
            if not users.conversations:
                raise DprlhfError(
                    "rollout.agent: tools are called in conversations, and data.prompt_column"
                    f" {self.recipe.data.prompt_column!r} holds plain text: give lists of messages"
                )
        if self.recipe.update.least_squares is not None:
            from dprlhf.updates.regression import check_dimension

            check_dimension(self.recipe.update, policy.dimension)

    def cut(self, policy: CausalLMPolicy, prompts: Prompts) -> list[bool]:
        """Return for each prompt whether it has more tokens than the recipe keeps."""
        most = self.recipe.data.max_prompt_tokens
        whole = policy.encode(prompts.prompts, most + 1, prompts.for_template)
        return [len(tokens) > most for tokens in whole]

    def settle(self, prepared: PreparedRun) -> None:
        """Load the rewards; decide the rollout's batch size, the adapter's start, the clip norm."""
        plan, policy, processes = prepared.plan, prepared.policy, prepared.processes
        users = prepared.users
        # A reward model takes its memory before it is found out how many responses fit into it.
        self.rewards = load_rewards(
            self.recipe.rewards, self._sources.rewards, device=processes.device
        )
        check_declared(self.rewards, self.recipe, users.column_names)
        # Earlier private runs of reward models must be accounted for.
        models = {f"rewards.{i}": reward.model for i, reward in enumerate(self.rewards)}
        self._sources.models |= {key: model for key, model in models.items() if model is not None}
        self.recipe = processes.on_main(
            lambda: with_batch_size(self.recipe, plan, policy, processes.count)
        )
        recipe, rollout = self.recipe, self.recipe.rollout
        # Gradients reuse the outputs of sampling; never in PPO, whose copies move. On a CPU the
        # processes share their memory.
        rows = plan.expected_batch_size * rollout.responses * recipe.data.prompts_in_round
        sharing = 1 if policy.device.type == "cuda" else processes.count
        if not isinstance(recipe.update, PPO):
            self.keep = most_kept(
                policy,
                rollout,
                rows=rows / processes.count * sharing,
                max_prompt_tokens=recipe.data.max_prompt_tokens,
            )
        self.public = evaluated(recipe, prepared.public)
        self.known = self.public or neutral_prompts(
            conversations=users.conversations and policy.tokenizer.chat_template is not None,
            in_rows=users.with_prompts,
        )
        start_adapter(policy, recipe, prepared.public, prepared.guides)
        self.rows_a_user = rollout.responses
        self.shapes = Shapes(
            prompt=recipe.data.max_prompt_tokens,
            response=rollout.max_new_tokens,
            rows=rollout.responses,
            num_generations=rollout.responses if rollout.shares_prompts else 1,
            prompts=recipe.data.prompts_in_round,
            update=recipe.update,
            rollout=None if rollout.backend == "vllm" else rollout,
            logprobs=recipe.update.reads_logprobs
            or recipe.kl.beta > 0
            or rollout.base_policy != "on-policy"
            or rollout.backend == "vllm",
            keep=self.keep,
        )

    def load(self, prepared: PreparedRun) -> None:
        """Check the rewards; make the telemetry coordinates."""
        recipe, plan, policy = self.recipe, prepared.plan, prepared.policy
        processes = prepared.processes
        rows = plan.expected_batch_size * recipe.rollout.responses / processes.count
        self._state = RoundState(0, plan.rounds, recipe.privacy.participations)
        if self.agent is not None:
            from dprlhf.agents import check_apart, check_fresh

            check_fresh(self.agent.agent, rows * recipe.data.prompts_in_round)
            check_apart(policy, recipe.rollout, self.known, recipe.data.max_prompt_tokens)
        self.spread = check_rewards(
            self.rewards,
            policy,
            recipe,
            self.known,
            prepared.users.column_names,
            private=self.public is None,
            most_rows=call_size(rows),
            state=self._state,
        )
        self.warnings = self.spread.warnings
        # One user's scores must not depend on another's rows, not even by rounding, and all
        # processes must score alike.
        rounded = processes.from_main(self.spread.rounded) | self.spread.rounded
        for i, reward in enumerate(self.rewards):
            called: dict[str, Any] = {"checked_rows": self.spread.checked_rows.get(reward.name, 0)}
            if reward.name in rounded:
                called = {"per_user": True, "checked_rows": 0}
            self.rewards[i] = LoadedReward(**{**vars(reward), **called})
        self.scorer = Scorer(self.rewards, recipe.reward_range, state=self._state)

        self.telemetry = TelemetryCoordinates.from_plan(plan, recipe.reward_range)
        if recipe.update.subspace is not None:
            from dprlhf.training.guidance import Guidance

            assert prepared.guides is not None
            self.guidance = Guidance(
                recipe.update.subspace, prepared.guides, recipe.seed, on_policy=True
            )
            self.guidance.check(policy.dimension)
            self.stateful = {"subspace": self.guidance}

    def rehearse(self, prepared: PreparedRun, folder: RunFolder) -> None:
        """Evaluate a few public prompts, and put the figures into the form of their files."""
        if self.public is None or self.recipe.evaluation is None:
            return
        tried = self._measured(prepared.policy, self.public.first(_REHEARSED))
        write_json(folder.evaluation, figures(tried, tried))
        write_json(folder.samples, samples(tried, tried))

    def attach(self, folder: RunFolder) -> None:
        """Send what the rewards print to a file in ``secret/``."""
        self.scorer.sink = sink = partial(append_secret, folder.secret / "reward-output.txt")
        if self.agent is not None:
            self.agent.sink = sink
            self.agent.agent.in_rounds = True

    # --- the rounds -------------------------------------------------------------------------

    def _after(self, rounds: int) -> RoundState:
        return RoundState(**{**vars(self._state), "global_step": rounds})

    def update(self, run: Run, batch: Batch) -> Outcome:
        """Sample responses to the users' prompts, score them, and update the policy."""
        recipe, longest = self.recipe, self.recipe.data.max_prompt_tokens
        self.scorer.state = self._after(batch.t - 1)
        for name, model in self._sources.models.items():
            refuse_foreign_hooks(model, name)
        subspace = None
        if self.guidance is not None:
            from dprlhf.training.guidance import policy_gradients

            gradients = partial(policy_gradients, run, batch, self.scorer)
            subspace = self.guidance.subspace(run, batch, gradients)

        def readable(users: NDArray[np.int64]) -> Prompts:
            with captured(None):  # a panic in compiled code prints the text that it failed on
                return run.users.readable(
                    users, lambda p: run.policy.encode(p.prompts, longest, p.for_template)
                )

        # Around all of it: public rows in between would drop the outputs kept for gradients.
        with self._trust_region(run, batch):
            batch.bar.start("sampling", batch.users)
            responses: Private[Responses] = sample_responses(
                run.policy,
                batch.users.map(readable),
                recipe.rollout,
                key=run.key,
                round_=batch.t,
                max_prompt_tokens=longest,
                tick=batch.tick,
                keep=self.keep,
            )
            batch.bar.start("rewards", batch.users)
            scores: Private[Scores] = score_private(self.scorer, responses)
            batch.bar.start("gradients", batch.users)
            round_ = PrivateRound(
                policy=run.policy,
                responses=responses,
                scores=scores,
                plan=run.plan,
                telemetry=self.telemetry,
                subspace=subspace,
                optimizer=run.optimizer,
                reduce=run.processes.sum,
                gate=batch.release,
                t=batch.t,
                tick=batch.tick,
            )
            subtract_kl(round_, recipe.kl, recipe.update.batch_size)
            if self.watch is not None:
                self.watch(round_)
            find_update(recipe.update)(round_, recipe.update)
        return self._outcome(round_)

    def _trust_region(self, run: Run, batch: Batch) -> AbstractContextManager[None]:
        if self.guidance is None:
            return nullcontext()
        from dprlhf.training.guidance import policy_rows

        return self.guidance.trust_region(run, batch, partial(policy_rows, run, batch))

    def _outcome(self, round_: PrivateRound) -> Outcome:
        """Return the round's metrics, among them the noised mean reward from the first release."""
        assert round_.released is not None
        assert round_.norms is not None
        metrics: dict[str, Any] = {}
        self._last_reward = reward = round_.reward
        if reward is not None:
            metrics["private_reward_noised"] = reward.mean
            metrics["private_reward_noise_std"] = reward.noise_std
            metrics["valid_share_noised"] = reward.valid_share
            metrics["valid_share_noise_std"] = reward.valid_std
        secret = round_.unpenalised.map(_rewards)
        return Outcome(round_.released, round_.norms, metrics, secret)

    def check_round(self, run: Run, t: int) -> None:
        """Warn where the released share of users with valid rewards is low; stop near zero."""
        if self._last_reward is None:
            return
        if not self._valid.rounds:  # a continued run goes on from the rounds that it has released
            for line in run.processes.on_main(lambda: JsonLines(run.folder.metrics).read()):
                if "valid_share_noised" in line and line["round"] < t:
                    self._valid.add(
                        line["valid_share_noised"],
                        line["valid_share_noise_std"],
                        run.plan.expected_batch_size,
                    )
        reward = self._last_reward
        self._valid.add(reward.valid_share, reward.valid_std, run.plan.expected_batch_size)
        problem = (
            f"the released share of users with valid rewards is {self._valid.mean:.2f} ±"
            f" {self._valid.error(max(self._valid.mean, 0.0)):.2f} after {self._valid.rounds}"
            f" rounds: check the reward (its first error is in {run.folder.operator})"
        )
        if self._valid.is_below(NEAR_ZERO):
            raise DprlhfError(
                f"{problem}; nothing is lost, but the users of the first {t} rounds are spent"
            )
        if not self.warned and self._valid.is_below(HEALTHY) and run.processes.main:
            self.warned = True
            run.progress.warn(problem)

    # --- evaluation, and what the run leaves ------------------------------------------------

    def finish(self, run: Run) -> None:
        """Do nothing: the policy moves in the rounds."""

    def evaluate(self, run: Run, description: str, *, during: bool = False) -> Evaluated | None:
        """Sample and score one continuation of each public prompt; None without such prompts.

        The last evaluation of the base model is kept, to compare those during the run with it.
        """
        if self.public is None:
            return None
        spec = self.recipe.evaluation
        assert spec is not None
        self.scorer.state = self._after(self._state.max_steps)
        processes = None if during else run.processes  # during the run the main process is alone
        share = len(self.public) / (processes.count if processes else 1)
        with run.progress.bar(description, math.ceil(share)) as tick:
            metrics = self._sources.compute_metrics
            measured = self._measured(
                run.policy, self.public, tick=tick, processes=processes, compute_metrics=metrics
            )
        if run.policy.is_base:
            self._before = measured
        return measured

    def _measured(self, policy: CausalLMPolicy, prompts: Prompts, **more: Any) -> Evaluated:
        recipe = self.recipe
        return evaluate(
            policy,
            self.scorer,
            prompts,
            recipe.rollout,
            seed=recipe.seed,
            max_prompt_tokens=recipe.data.max_prompt_tokens,
            batch_size=recipe.update.batch_size,
            **more,
        )

    def seconds_a_round(self, run: Run) -> float | None:
        """Time a response's phases on public prompts, or without them on neutral ones."""
        self.timing = seconds_a_response(
            run.policy, self.scorer, self.known, self.recipe, keep=self.keep
        )
        return seconds_a_round(self.recipe, run.plan, self.timing, run.guides)

    def public_metrics(self, run: Run, t: int) -> dict[str, float | None]:
        """Evaluate on the public prompts after round t, and keep a few of the responses."""
        public = self.evaluate(run, f"evaluation after round {t}", during=True)
        assert public is not None
        kept = JsonLines(run.folder.public_samples)
        for line in first_samples(public, t):
            kept.write(line)
        against_base = comparison_metrics(compared(self._before, public))
        return {**as_metrics(public.estimates), **against_base}

    def write(self, run: Run, before: Evaluated | None, after: Evaluated | None) -> None:
        """Write ``samples.json``, ``evaluation.json`` and ``timing.json``, from public prompts.

        Also say what released and public values show against the result.
        """
        estimates = [one.estimate if one is not None else None for one in (before, after)]
        lines = list(JsonLines(run.folder.metrics).read())
        for warning in drift_warnings(lines, self.recipe.reward_range, *estimates):
            print(f"dprlhf: warning: {warning}", file=sys.stderr)
        if before is not None and after is not None:
            write_json(run.folder.evaluation, figures(before, after))
            write_json(run.folder.samples, samples(before, after))
            if self.timing:  # a run that was continued may have made no subspace
                write_json(run.folder.timing, self.timing)

    def result(self, run: Run, before: Evaluated | None, after: Evaluated | None) -> Result:
        """Return the tuned policy, the guarantee and the public rewards."""
        comparison = compared(before, after)
        return Result(
            folder=run.folder,
            plan=run.plan,
            before=before.estimate if before else None,
            after=after.estimate if after else None,
            difference=comparison["reward"].difference if comparison else None,
            samples=samples(before, after) if before and after else [],
            policy=run.policy,
            compared=comparison,
        )


def _rewards(scored: Scores) -> dict[str, Any]:
    """Return this process's raw rewards and what they logged for ``secret/``, JSON-ready."""
    metrics: dict[str, Any] = {
        "reward_mean": float(scored.values.mean()) if len(scored.values) else None,
        "reward_failures": dict(scored.failures),
        "reward_problem": scored.problem or None,
    }
    if scored.logged.metrics or scored.logged.extra:
        metrics["reward_logged"] = {
            "metrics": dict(scored.logged.metrics),
            "extra": dict(scored.logged.extra),
        }
    return metrics
