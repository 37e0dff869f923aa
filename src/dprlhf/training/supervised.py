"""The supervised stages: ``dprlhf sft``, ``dprlhf reward``, ``dprlhf dpo``, ``dprlhf feedback``.

The gradient of a user's loss, over all of its rows, is clipped to the norm S; a round releases the
noised sum over its users through the same gate, charged to the same kind of ledger, as a private
update (DP-SGD with one user as the unit). The result is an adapter, and the merged model
(``model/``) for the next stage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dprlhf.boundary import Private
from dprlhf.data.columns import NUMBERS, is_text
from dprlhf.data.in_memory import InMemoryInputs
from dprlhf.data.public import evaluated, held_out
from dprlhf.data.users import Prompts, Users
from dprlhf.errors import EXITS, DprlhfError, one_line
from dprlhf.gradients.clipping import Weighted, clipped_sum
from dprlhf.policies.activations import align_with_activations
from dprlhf.policies.causal_lm import LENGTH_ROWS, CausalLMPolicy, usual_length
from dprlhf.policies.classifier import load_reward_model
from dprlhf.policies.loading import load_policy
from dprlhf.policies.optimizers import ascend
from dprlhf.privacy.plan import Plan
from dprlhf.recipe import Data, RewardRecipe, SFTRecipe
from dprlhf.recipe.supervised import StageRecipe
from dprlhf.rewards.isolation import captured
from dprlhf.rollout import Responses
from dprlhf.runs.checkpoint import Stateful
from dprlhf.runs.folder import RunFolder, write_json
from dprlhf.runs.publish import UnmergeableError, merge, write_merged
from dprlhf.training.evaluate import RewardEstimate, as_metrics, estimate
from dprlhf.training.guidance import Gradients, Guidance
from dprlhf.training.made_up_rounds import Shapes
from dprlhf.training.run import Batch, Outcome, PreparedRun, Run, Summarised, summary_of
from dprlhf.training.tasks import Labels, NextTokens, Pairs, Task, are_cut, check_template
from dprlhf.training.timing import rows_a_round, seconds_a_row
from dprlhf.updates.public_gradients import weighted_gradients


def check_columns(data: Data) -> None:
    """Refuse a section in which two keys name one column, so that no row could be read."""
    keys: dict[str, str] = {}
    for key in _column_keys(data):
        column = getattr(data, key)
        if column in keys:
            raise DprlhfError(
                f"data.{keys[column]} and data.{key} are both {column!r}: each needs a column of"
                " its own (of preference pairs, dprlhf dpo alone reads the prompt from chosen)"
            )
        keys[column] = key


def _column_keys(data: Data) -> list[str]:
    """Return the keys of the columns that a task reads; an implicit prompt has none of its own."""
    pairs = [key for key in ("chosen_column", "rejected_column") if hasattr(data, key)]
    keys = [*(key for key in type(data).model_fields if key.endswith("_column")), *pairs]
    unread = {"user_column"}
    if getattr(data, "label_column", None) is not None:
        unread |= {"chosen_column", "rejected_column"}
    if getattr(data, "implicit_prompt", False):
        unread.add("prompt_column")
    return [key for key in keys if key not in unread and getattr(data, key) is not None]


_ASKED, _ANSWERS = "How is the weather today?", ("It rains.", "The sun is out.")


def made_up_rows(data: Data, schema: pa.Schema, usual: dict[str, Any]) -> list[Prompts]:
    """Return made-up rows of the form that the types of the users' columns give."""
    unmade = {data.prompt_column, getattr(data, "label_column", None), *usual}
    named = [getattr(data, key) for key in _column_keys(data)]
    others = [column for column in named if column not in unmade]
    implicit = getattr(data, "implicit_prompt", False)
    asked = _made_up(
        schema.field(data.prompt_column).type,
        _ANSWERS[0],
        asked=True,
        answered=not others or implicit,
    )
    answers = [
        _made_up(schema.field(column).type, answer, asked=implicit, answered=True)
        for column, answer in zip(others, cycle(reversed(_ANSWERS)), strict=False)
    ]
    first = np.zeros(1, dtype=np.int64)
    values = {column: [value] for column, value in usual.items()}
    return [
        Prompts(
            [prompt if isinstance(prompt, list) else str(prompt)],
            first,
            first,
            {column: [value] for column, value in zip(others, rest, strict=True)} | values,
        )
        for prompt, *rest in product(asked, *answers)
    ]


def _made_up(kind: pa.DataType, answer: str, *, asked: bool, answered: bool) -> list[Any]:
    """Return made-up values of a column: a text, a number or messages, or one of each kind."""
    said = {"user": _ASKED} if asked else {}
    said |= {"assistant": answer} if answered else {}
    text = " ".join(said.values())
    if is_text(kind):
        return [1 if any(is_number(kind) for is_number in NUMBERS) else text]
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    message: Any = kind.value_type if lists else None
    at = message.get_field_index("content") if isinstance(message, pa.StructType) else -1
    parts = at >= 0 and pa.types.is_nested(message.field(at).type)
    messages = [
        {"role": role, "content": [{"type": "text", "text": content}] if parts else content}
        for role, content in said.items()
    ]
    return [messages] if lists else [text, messages]


def failure_message(act: Callable[[], object], *, quoted: bool) -> str:
    """Return why something fails; empty where it does not."""
    try:
        act()
    except EXITS:
        raise
    except DprlhfError as error:
        return str(error)
    except BaseException as error:  # a panic in a tokenizer's compiled code is no Exception
        name = type(error).__name__
        return f"{name}: {one_line(error, 100)}" if quoted else name
    return ""


S = TypeVar("S", bound=StageRecipe)


def with_lengths(recipe: S, task: Task, policy: CausalLMPolicy, public: Users | None) -> S:
    """Settle how many tokens rows keep, where the recipe does not state it and PUBLIC rows show it.

    Where these are more than the model's context, a prompt and a completion have half of it each,
    or what the other leaves.
    """
    data, lengths = recipe.data, {}
    if public is not None:
        with suppress(Exception):  # their own check says what is wrong with them
            some = public.select(np.arange(min(LENGTH_ROWS, public.count)), missing=False)
            lengths = task.lengths(policy, some)
    usual = {n: usual_length(of) for n, of in lengths.items() if n not in data.model_fields_set}
    least = policy.room / len(usual) if len(usual) == len(lengths) > 0 else 1
    settled = {}
    for name, most in usual.items():
        others = sum(usual.get(o, getattr(data, o)) for o in lengths if o != name)
        settled[name] = int(min(most, max(least, policy.room - others)))
    return recipe.model_copy(update={"data": data.model_copy(update=settled)})


Losses = dict[str, RewardEstimate]
"""The mean of each public metric of a task (``loss``, ``accuracy``), with its standard error."""


@dataclass(frozen=True, repr=False)
class StageResult(Summarised):
    """The result of a finished supervised stage.

    Attributes:
        folder: The run folder; its ``model/`` is the base model for the next stage's recipe.
        plan: The privacy plan of this stage alone; ``privacy.json`` also has the total.
        before: The loss (and accuracy) of the untouched model on public rows; empty without
            evaluation.
        after: The loss (and accuracy) of the tuned model on the same rows.
        policy: The tuned model.
    """

    folder: RunFolder
    plan: Plan
    before: Losses
    after: Losses
    policy: CausalLMPolicy

    @property
    def summary(self) -> list[tuple[str, str]]:
        """The run folder, the guarantee, and the public losses before and after."""
        means = {f"public {n}": (before, self.after[n]) for n, before in self.before.items()}
        return summary_of(self.folder, self.plan, means)


def fine_tuning(recipe: SFTRecipe, sources: InMemoryInputs) -> Supervised:
    """Return the stage of ``dprlhf sft``."""
    return Supervised(recipe, sources, lambda settled: NextTokens(settled.data))


def reward_modelling(recipe: RewardRecipe, sources: InMemoryInputs) -> Supervised:
    """Return the stage of ``dprlhf reward``."""
    if (labels := recipe.labels) is None:
        return Supervised(recipe, sources, lambda settled: Pairs(settled.data))
    return Supervised(recipe, sources, lambda settled: Labels(settled.data, labels))


class Supervised:
    """A supervised stage; see :class:`dprlhf.training.run.Stage` for its methods."""

    on_policy = False  # whether the policy wrote the public rows of directions

    def __init__(
        self,
        recipe: StageRecipe,
        sources: InMemoryInputs,
        task: Callable[[Any], Task],  # makes it of the recipe, anew once lengths are settled
    ) -> None:
        check_columns(recipe.data)
        self.recipe = recipe
        self.task = task(recipe)
        self._made_up: list[Prompts] = []
        self.public: Prompts | None = None
        self.guidance: Guidance | None = None
        self.stateful: dict[str, Stateful] = {}
        self.warnings: list[str] = []
        self.rows_a_user = self.task.rows * recipe.data.prompts_in_round
        self._task = task
        self._sources = sources

    # --- before the run ---------------------------------------------------------------------

    def load_policy(self, public: Users | None) -> CausalLMPolicy:
        """Load the model, settle lengths, and check that a row fits into the model's context."""
        spec, seed, head = self.recipe.policy, self.recipe.seed, self.recipe.classifier
        policy: CausalLMPolicy = self._sources.policy or (
            load_reward_model(spec, self.recipe.head_labels, seed=seed)
            if head
            else load_policy(spec, seed=seed)
        )
        self.recipe = with_lengths(self.recipe, self.task, policy, public)
        self.task = self._task(self.recipe)
        prompt, response = self.recipe.data.widths
        tokens = prompt + (0 if head else response)
        policy.check_context_length(tokens, f"data: {tokens} tokens are", spec.model_name_or_path)
        return policy

    @property
    def shapes(self) -> Shapes:
        """The shapes of the rows of a round."""
        prompt, response = self.recipe.data.widths
        return Shapes(
            prompt=prompt,
            response=response,
            rows=self.task.rows,
            num_generations=1,
            prompts=self.recipe.data.prompts_in_round,
            update=self.recipe.update,
            logprobs=getattr(self.task, "reads_logprobs", True),  # of others: unknown
        )

    def check_rows(self, rows: Any) -> None:
        """Make up rows of the form that the types of the columns give, to be read in their place.

        A row that lacks a value, or has an unknown label, is found as it is read, and contributes
        nothing.
        """
        self._made_up = made_up_rows(self.recipe.data, rows.features.arrow_schema, self._usual)

    @property
    def _usual(self) -> dict[str, Any]:
        """A value of each column whose values are no texts, for a made-up row."""
        labels = self.recipe.head_labels
        return {str(getattr(self.recipe.data, "label_column", None)): labels[0]} if labels else {}

    def check_policy(self, users: Users, policy: CausalLMPolicy) -> None:
        """Refuse rows of a form that cannot be read."""
        if not self.recipe.classifier:
            check_template(self.recipe.data, users, policy)
        # A user who cannot be read contributes nothing and ends no run; if nobody could be, the run
        # would spend its whole budget on noise.
        problems = [
            failure_message(partial(self.task.encode, policy, row), quoted=True)
            for row in self._made_up
        ]
        if problems and all(problems):
            raise DprlhfError(
                "data: no row can be read, as a made-up one with the same columns and types shows:"
                f" {problems[0]}"
            )

    def cut(self, policy: CausalLMPolicy, prompts: Prompts) -> list[bool]:
        """Return for each row whether it has more tokens than the recipe keeps."""
        return are_cut(self.recipe.data, self.task.lengths(policy, prompts))

    def settle(self, prepared: PreparedRun) -> None:
        """Check the public rows; initialise the adapter from some, where the recipe says so."""
        recipe, public = self.recipe, prepared.public
        self.public = evaluated(recipe, public)
        if self.public is not None and public is not None:
            self._check_public(prepared.policy, public, self.public.users, "evaluation.data")
        if recipe.policy.adapter.init == "public-activations" and public is not None:
            fitted = held_out(recipe, public)
            self._check_public(prepared.policy, public, fitted.users, "evaluation.data")
            some = self.task.encode(prepared.policy, fitted)
            align_with_activations(
                prepared.policy, some.tokens, some.mask, recipe.update.batch_size
            )

    def _check_public(
        self, policy: CausalLMPolicy, public: Users, rows: NDArray[np.int64], key: str
    ) -> None:
        """Refuse unreadable public rows, which would end the run after its first charge."""

        def read(some: NDArray[np.int64]) -> None:
            self.task.encode(policy, public.select(some, missing=False))

        for part in np.array_split(rows, -(-len(rows) // 1024) or 1):
            message = failure_message(partial(read, part), quoted=False)
            if not message:
                continue
            for row in part:
                if alone := failure_message(partial(read, np.array([row])), quoted=False):
                    message = f"{alone} (row {row + 1})"
                    break
            where = key.removesuffix("data") if message.startswith("data.") else f"{key}: "
            raise DprlhfError(where + message)

    def load(self, prepared: PreparedRun) -> None:
        """Check the public rows of ``update.subspace``; everything else is loaded before."""
        spec = self.recipe.update.subspace
        if spec is None:
            return
        assert prepared.guides is not None
        guides, key = prepared.guides, "update.subspace.data" if spec.data else "evaluation.data"
        self.guidance = Guidance(spec, guides, self.recipe.seed, on_policy=self.on_policy)
        self.guidance.check(prepared.policy.dimension)
        self.stateful["subspace"] = self.guidance
        rows = np.arange(guides.first, guides.rows.count)
        self._check_public(prepared.policy, guides.rows, rows, key)

    def rehearse(self, prepared: PreparedRun, folder: RunFolder) -> None:
        """Take the loss of a public row, and write the merged model."""
        if self.public is not None:
            encoded = self.task.encode(prepared.policy, self.public.first(1))
            self.task.losses(prepared.policy, encoded, self.recipe.update.batch_size)
        try:
            write_merged(folder, folder.model, prepared.earlier.records)
        except UnmergeableError as error:
            raise DprlhfError(
                f"policy.adapter: {error}, so the model for the next stage could"
                " not be written (tried before the first round): choose other target_modules, or"
                " another type"
            ) from None

    def attach(self, folder: RunFolder) -> None:
        """Do nothing: a supervised stage writes no files of its own during the rounds."""

    # --- the rounds -------------------------------------------------------------------------

    def update(self, run: Run, batch: Batch) -> Outcome:
        """Release the clipped sum of the users' loss gradients, and step along it."""
        subspace = None
        if self.guidance is not None:
            subspace = self.guidance.subspace(run, batch, partial(self._gradients, run))
        batch.bar.start("gradients", batch.users)
        batch_size = self.recipe.update.batch_size

        def weighted(users: NDArray[np.int64]) -> Weighted:
            encoded = self.encoded(run, users)
            weights = self.task.weights(run.policy, encoded, batch_size)
            return Weighted(encoded, weights, np.zeros((encoded.users, 0)), 0.0)

        clipped = clipped_sum(
            run.policy,
            batch.users.map(weighted),
            clip_norm=run.plan.clip_norm,
            batch_size=batch_size,
            reduce=run.processes.sum,
            most_users=run.plan.users,
            subspace=subspace,
            tick=batch.tick,
        )
        released = batch.release(clipped.bounded)
        if subspace is not None:
            released = released.map(subspace.lift)
        limited: AbstractContextManager[None] = nullcontext()
        if self.guidance is not None:
            limited = self.guidance.trust_region(run, batch, partial(self.task.encode, run.policy))
        with limited:
            ascend(run.policy.parameters.values(), run.optimizer, released)
        return Outcome(released, clipped.norms, {}, Private({}))

    def _gradients(self, run: Run, public: Prompts) -> Gradients:
        """Return what PUBLIC rows would contribute."""
        encoded, size = self.task.encode(run.policy, public), self.recipe.update.batch_size
        weights = self.task.weights(run.policy, encoded, size)
        return weighted_gradients(run.policy, encoded, weights, size), None

    def encoded(self, run: Run, users: NDArray[np.int64]) -> Responses:
        """Return the rows of some users that can be read, as tokens."""
        with captured(None):  # a panic in compiled code prints the text that it failed on
            rows = run.users.readable(users, lambda some: self.task.encode(run.policy, some))
            return self.task.encode(run.policy, rows)  # warnings may quote it here, too

    def check_round(self, run: Run, t: int) -> None:
        """Check nothing: a supervised release does not show that the run cannot succeed."""

    def finish(self, run: Run) -> None:
        """Do nothing: the policy moves in the rounds."""

    # --- evaluation, and what the run leaves ------------------------------------------------

    def evaluate(self, run: Run, description: str) -> Losses:
        """Return the mean loss (and accuracy) on the public rows; empty without such rows."""
        if self.public is None:
            return {}
        with run.progress.bar(description, len(self.public)) as tick:
            encoded = self.task.encode(run.policy, self.public)
            losses = self.task.losses(run.policy, encoded, self.recipe.update.batch_size)
            tick(len(self.public))
        return {name: estimate(v) for name, v in zip(self.task.metrics, losses, strict=True)}

    def seconds_a_round(self, run: PreparedRun, of_row: float | None = None) -> float | None:
        """Time the gradient of a micro-batch of public rows, unless a row's seconds are given."""
        if self.public is None:
            return None
        size = self.recipe.update.batch_size
        if of_row is None:
            some, clip_norm = self.public.first(size), run.plan.clip_norm
            of_row = seconds_a_row(run.policy, self.task, some, size, clip_norm)
        return of_row * rows_a_round(self.recipe, run.plan, run.guides)

    def public_metrics(self, run: Run, t: int) -> dict[str, float | None]:
        """Evaluate on the public rows after round t."""
        return as_metrics(self.evaluate(run, f"evaluation after round {t}"))

    def write(self, run: Run, before: Losses, after: Losses) -> None:
        """Write ``evaluation.json``, and the whole model for the next stage."""
        if after:
            both = {"before": before, "after": after}
            write_json(
                run.folder.evaluation,
                {when: {n: e.as_dict() for n, e in v.items()} for when, v in both.items()},
            )
        merge(run.folder.path, run.folder.model, replace=True)

    def result(self, run: Run, before: Losses, after: Losses) -> StageResult:
        """Return the tuned model, the guarantee and the public losses."""
        return StageResult(run.folder, run.plan, before, after, run.policy)
