"""Learning from logged feedback: what users did with what they were shown (``dprlhf feedback``).

A row is a completion y that a policy μ wrote and one user saw, and that user's feedback r. The
gradient of a user's loss, its mean over the user's own rows, is clipped as in every stage; nothing
compares two users. With A = r − b, b a public constant, and Δ = log π(y|x) − log μ(y|x):

- ``policy_gradient`` takes min(π/μ, 2) A ∇ log π. Of n tokens the ratio of the whole completion is
  a product: the log of it grows with n, and of a long text nearly every ratio is 0 or cut to 2. So
  it is, as in GSPO (arXiv 2507.18071), the geometric mean over tokens exp(Δ/n). The price is bias:
  the gradient is that of E_μ[n exp(Δ/n) A], which is the policy gradient at π = μ alone.
- ``kto`` (arXiv 2402.01306) is TRL's loss 1 − σ(±β(Δ − z₀)). There z₀, the KL divergence, is a
  mean over the batch; with a guarantee for one user it must not be. Here it is a mean over PUBLIC
  rows, each with another row's completion, under the weights that were released; without public
  rows it is 0, the loss that TRL calls ``apo_zero_unpaired``. The gradient is that of 4/β
  times the loss: at Δ = z₀ a row then counts by ±1, as it does by A above, and the same clip norm
  suits both. At TRL's scale a user's gradient would be about 40 times smaller than the default S,
  and the noise, which follows S, as much larger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from dprlhf.boundary import Private, Released
from dprlhf.data.columns import called, is_json, is_text
from dprlhf.data.spelling import spelt
from dprlhf.data.users import Prompts
from dprlhf.errors import DprlhfError
from dprlhf.gradients.clipping import clipped_vectors
from dprlhf.policies.causal_lm import CausalLMPolicy
from dprlhf.recipe import FeedbackRecipe
from dprlhf.recipe.base import changed
from dprlhf.rollout import Responses
from dprlhf.rollout.logprobs import log_ratio_to_base, token_logprobs
from dprlhf.runs.card import note_value
from dprlhf.runs.folder import write_json
from dprlhf.training.guidance import Gradients
from dprlhf.training.rounds import released_values
from dprlhf.training.run import Batch, Outcome, PreparedRun, Run
from dprlhf.training.supervised import Losses, StageResult, Supervised
from dprlhf.training.tasks import Lengths, NextTokens, are_cut
from dprlhf.updates.public_gradients import weighted_gradients

MOST = 4.0
"""Bound c on a row's importance ratio. A larger one truncates less and needs more noise."""

_BOUND = math.sqrt(MOST**2 + 1)
_Z = 1.959963984540054
"""The 97.5% quantile of the normal distribution: each end of an interval fails in 2.5%."""


@dataclass(frozen=True)
class Value:
    """The mean feedback that a policy would get, estimated from the logs."""

    mean: float | None  # The self-normalised estimate Σ w r / Σ w; None where the noise hides Σ w
    low: float  # Lower end of the 95% interval
    high: float  # Upper end of it
    # Noised mean ratio, at most about 1: the part of the policy's completions of which the logs
    # tell something, and which the mean is about
    weight: float

    def __str__(self) -> str:
        mean = "hidden by the noise" if self.mean is None else f"{self.mean:+.3f}"
        return f"{mean} (95% interval {self.low:+.3f} to {self.high:+.3f})"


def of_users(
    user: NDArray[np.int64],  # of each row, [rows]
    users: int,
    log_ratios: Array,  # log π − log μ of each row's completion, [rows]
    shares: Array,  # the feedback a of each row, in [0, 1], [rows]
    scale: float,  # the clip norm S
) -> torch.Tensor:
    """Return each user's vector, of norm at most ``scale``, ``[users, 4]``; 0 without a row.

    It is (p, q, p₀, q₀): the means over its rows of w a, w (1 − a), a and 1 − a, where a in [0, 1]
    is the row's feedback and w = min(π(y|x)/μ(y|x), c) the truncated ratio of the whole completion.
    Since p + q ≤ c and p₀ + q₀ = 1, its norm is at most √(c² + 1), by which it is scaled. It is
    clipped, summed and released as a gradient is, in the place of the last gradients:
    ``docs/proofs/logged_value.md``.
    """
    ratios = np.exp(np.minimum(log_ratios, math.log(MOST)))
    ratios[np.isnan(log_ratios)] = np.nan  # its user contributes nothing
    parts = np.stack([ratios * shares, ratios * (1 - shares), shares, 1 - shares], axis=1)
    rows = np.maximum(np.bincount(user, minlength=users), 1)
    means = [np.bincount(user, part, minlength=users) / rows for part in parts.T]
    return torch.from_numpy(np.stack(means, axis=1) * (scale / _BOUND))


class LoggedValue:
    """The released vectors so far, which a checkpoint keeps."""

    def __init__(self) -> None:
        self.rounds = 0
        self._sum = np.zeros(4)
        self._variance = 0.0

    def state(self) -> dict[str, torch.Tensor]:
        """Return the sums, all of them released or public."""
        return {"sums": torch.tensor([*self._sum, self._variance, self.rounds])}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned."""
        *sums, self._variance, rounds = state["sums"].tolist()
        self._sum, self.rounds = np.array(sums), int(rounds)

    def add(self, released: list[float], noise_std: float, scale: float) -> None:
        """Count a round's RELEASED mean vector."""
        self.rounds += 1
        self._sum += np.array(released) * (_BOUND / scale)
        self._variance += (noise_std * _BOUND / scale) ** 2

    def estimates(self, users_a_round: float, middle: float, bound: float) -> dict[str, Value]:
        """Return the value of the ``tuned`` policy, and of the ``logged`` one."""
        p, q, p0, q0 = (self._sum / self.rounds).tolist()
        std, users = math.sqrt(self._variance) / self.rounds, users_a_round * self.rounds
        both = {"tuned": (p, q, MOST), "logged": (p0, q0, 1.0)}
        return {n: _estimate(*of_one, std, users, middle, bound) for n, of_one in both.items()}


def _estimate(
    p: float, q: float, most: float, std: float, users: float, middle: float, bound: float
) -> Value:
    """Return the estimate from the noised means p of w a and q of w (1 − a), w in [0, most]."""

    def feedback(share: float) -> float:
        return middle + bound * (2 * min(max(share, 0.0), 1.0) - 1)

    mean = feedback(p / (p + q)) if p + q > max(3 * math.sqrt(2) * std, 1e-9) else None
    ends = least(p, most, std, users), 1 - least(q, most, std, users)
    low, high = (feedback(end) for end in ends)
    return Value(mean, low, high, p + q)


def least(noised: float, most: float, std: float, users: float) -> float:
    """Return the lower 97.5% confidence bound of a mean of values in [0, ``most``].

    The variance of such a value is at most ``most`` times its mean x. So the bound is the smaller
    root x of (noised − x)² = z² (std² + most · x / users), noise and sampling together.
    """
    half = _Z**2 * most / users / 2
    root = math.sqrt(max(half**2 + 2 * half * noised + (_Z * std) ** 2, 0.0))
    return min(max(noised + half - root, 0.0), 1.0)


Array = NDArray[np.float64]

_COMPARED = 64
"""Most public rows over which the reference point of KTO is a mean."""

# What ``policy_gradient`` lets an importance ratio count at most, a geometric mean over a
# completion's tokens. On-policy it is 1, and every update truncates its ratios at 2.
LARGEST_RATIO = 2.0


class Reactions:
    """The losses of logged feedback and their derivatives, as weights of log-probabilities."""

    rows = 1
    metrics: tuple[str, ...] = ("loss",)

    def __init__(self, spec: FeedbackRecipe) -> None:
        self._data = spec.data
        self._update = spec.update
        self._shown = NextTokens(spec.data)
        self._compared: Responses | None = None

    def encode(self, model: CausalLMPolicy, examples: Prompts) -> Responses:
        """Return a row for each completion, with its A and what is logged of its likelihood."""
        extra, column = self.logged(examples), self._data.logprob_column
        if column is not None and any(are_cut(self._data, self._shown.lengths(model, examples))):
            raise DprlhfError(
                "a completion, or its prompt, is longer than what is kept, so that its"
                f" {column!r} is that of another text: raise data.max_completion_tokens or"
                " data.max_prompt_tokens"
            )
        encoded = self._shown.encode(model, examples)
        return Responses(**{**vars(encoded), "extra": extra})

    def logged(self, examples: Prompts) -> dict[str, list[Any]]:
        """Return A of each row, and its log-probability where there is a column of them."""
        data, columns = self._data, examples.columns
        reactions = [reaction(value, data.label_column) for value in columns[data.label_column]]
        bound = self._update.reward_range
        counts = np.clip(np.array(reactions) - self._update.baseline, -bound, bound)
        logged: dict[str, list[Any]] = {"counts": counts.tolist()}
        if (name := data.logprob_column) is not None:
            logged["logged"] = [log_probability(value, name) for value in columns[name]]
        return logged

    def lengths(self, model: CausalLMPolicy, examples: Prompts) -> Lengths:
        """Return the tokens of each row's prompt, and of its completion and end."""
        self.logged(examples)
        return self._shown.lengths(model, examples)

    def compare_with(self, model: CausalLMPolicy, public: Prompts) -> None:
        """Take ``kto``'s reference point from PUBLIC rows: each prompt, another's completion."""
        some, column = public.first(_COMPARED), self._data.completion_column
        others = some.columns[column]
        others = [*others[-1:], *others[:-1]]
        self._compared = self._shown.encode(
            model, some.changed(columns={**some.columns, column: others})
        )

    def reference_point(self, model: CausalLMPolicy, batch_size: int) -> float:
        """Return z₀ under the model as it is: max(0, mean Δ) over public rows; 0 without any."""
        if self._compared is None or self._update.loss_type != "kto":
            return 0.0
        gained = log_ratio_to_base(model, self._compared, batch_size).sum(1)
        return max(0.0, float(gained.mean()))

    def weights(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> Array:
        """Return minus the scaled derivative of the user's mean loss by each log-probability.

        It is ``[rows]``, and depends on the user's own rows, on public rows and on the model alone.
        """
        _, slopes = self._of_rows(model, encoded, batch_size)
        rows = np.bincount(encoded.user, minlength=encoded.users)[encoded.user]
        shares: Array = slopes / rows
        return shares

    def losses(self, model: CausalLMPolicy, encoded: Responses, batch_size: int) -> list[Array]:
        """Return the loss of each row, ``[rows]``; of ``policy_gradient`` −n min(ratio, c) A."""
        return [self._of_rows(model, encoded, batch_size)[0]]

    def _of_rows(
        self, model: CausalLMPolicy, encoded: Responses, batch_size: int
    ) -> tuple[Array, Array]:
        """Return each row's loss, and minus its scaled derivative by log π, ``[rows]`` each."""
        update, counts = self._update, np.array(encoded.extra["counts"], dtype=np.float64)
        gained = log_ratio(model, encoded, batch_size)
        if update.loss_type not in ("kto", "apo_zero_unpaired"):
            tokens = np.maximum(encoded.response_mask.sum(1).numpy(), 1)
            kept = np.exp(np.minimum(gained / tokens, math.log(LARGEST_RATIO))) * counts
            return -tokens * kept, kept
        side = np.sign(counts)
        weight = np.abs(side)  # TRL's weights of desirable and undesirable completions are 1
        ahead = side * update.beta * (gained - self.reference_point(model, batch_size))
        missing = np.exp(-np.logaddexp(0, ahead))  # 1 − σ
        return weight * missing, weight * side * 4 * missing * (1 - missing)


def log_ratio(model: CausalLMPolicy, encoded: Responses, batch_size: int) -> Array:
    """Return Δ = log π(y|x) − log μ(y|x) of each completion, ``[rows]``.

    μ is the policy with its adapter off, or what is logged of the policy that wrote the completion.
    """
    gained: Array
    if "logged" in encoded.extra:
        now = token_logprobs(model, encoded, batch_size).sum(1)
        gained = now - np.array(encoded.extra["logged"], dtype=np.float64)
    else:
        gained = log_ratio_to_base(model, encoded, batch_size).sum(1)
    return gained


def reaction(value: Any, column: str) -> float:
    """Return a row's feedback as a number: true is 1, false is −1, and a number is itself.

    A file with a stray word in this column has texts throughout, so texts are read, too.
    """
    value = spelt(value)
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    number = _number(value)
    if number is None:  # which is not quoted
        raise DprlhfError(
            f"data.label_column {column!r}: a row's feedback is none of true, false and the numbers"
        )
    return number


def log_probability(value: Any, column: str) -> float:
    """Return a row's log-probability."""
    number = None if isinstance(value, bool) else _number(value)
    if number is None or number > 0:
        raise DprlhfError(
            f"data.logprob_column {column!r}: a row's log-probability is no number up to 0"
        )
    return number


def _number(value: Any) -> float | None:
    """Return a finite number, also one that is written as text; None for anything else."""
    value = spelt(value)
    number = float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan
    return number if math.isfinite(number) else None


class FromFeedback(Supervised):
    """The stage of ``dprlhf feedback``; see :class:`Supervised`."""

    recipe: FeedbackRecipe
    task: Reactions

    def __init__(self, recipe: FeedbackRecipe, *given: Any, **named: Any) -> None:
        super().__init__(recipe, *given, **named)
        self._logged = LoggedValue()
        if recipe.update.value_rounds:
            self.stateful["value"] = self._logged

    @property
    def _usual(self) -> dict[str, Any]:
        data = self.recipe.data
        logged = {} if data.logprob_column is None else {data.logprob_column: -1.0}
        return {data.label_column: True, **logged}

    def check_rows(self, rows: Any) -> None:
        """Also refuse columns whose type, which is public, holds no truth values or numbers."""
        data, schema = self.recipe.data, rows.features.arrow_schema
        for key, column in (("label", data.label_column), ("logprob", data.logprob_column)):
            kind = None if column is None else schema.field(column).type
            if kind is not None and not (is_text(kind) or is_json(kind)):
                raise DprlhfError(
                    f"data.{key}_column {column!r} holds {called(kind)}: give"
                    f" {'true and false, or numbers' if key == 'label' else 'numbers up to 0'}"
                )
        kind, update = schema.field(data.label_column).type, self.recipe.update
        as_is = not (changed(update, "baseline") or changed(update, "reward_range"))
        if as_is and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            self.warnings = [
                f"data.label_column {data.label_column!r} holds numbers: a label of"
                f" {update.baseline:g} says nothing (update.baseline), and what is further from it"
                f" than {update.reward_range:g} counts as that (update.reward_range); with labels"
                " 0 and 1, set update.baseline=0.5"
            ]
        super().check_rows(rows)

    def settle(self, prepared: PreparedRun) -> None:
        """Also take the public rows of KTO's reference point."""
        super().settle(prepared)
        if self.public is not None:
            self.task.compare_with(prepared.policy, self.public)

    def _gradients(self, run: Run, public: Prompts) -> Gradients:
        """Return |A| ∇ log π of PUBLIC rows, and their unit scores, which directions avoid.

        A direction has no sign, and takes no ratio of policies, which would be two more passes.
        Clipped scores ∇ log π of a log have a mean. Along it the policy would move without any
        preference, away from the log where most labels are false.
        """
        encoded, update = self.task.encode(run.policy, public), self.recipe.update
        sizes = np.abs(encoded.extra["counts"])
        if update.loss_type != "policy_gradient":
            sizes = np.sign(sizes)  # kto's weights, at its reference point
        vectors = weighted_gradients(run.policy, encoded, sizes, update.batch_size)
        return vectors, torch.nn.functional.normalize(vectors)

    # --- the value of the tuned policy ------------------------------------------------------

    def update(self, run: Run, batch: Batch) -> Outcome:
        """Release a gradient; or, in the last rounds, what the logs say of the policy's value."""
        if batch.t <= run.plan.rounds - self.recipe.update.value_rounds:
            return super().update(run, batch)
        batch.bar.start("value", batch.users)
        scale = run.plan.clip_norm if math.isfinite(run.plan.clip_norm) else 1.0
        released, norms = self.release(run, batch, partial(self._vectors, run, scale), 4)
        std = run.plan.noise_std_of(batch.t) / run.plan.expected_batch_size
        self._logged.add(released_values(released), std, scale)
        metrics = {
            f"value_{n}_{k}": x for n, v in self.values(run).items() for k, x in asdict(v).items()
        }
        return Outcome(released, norms, metrics, Private({}))

    @staticmethod
    def release(
        run: Run, batch: Batch, vectors: Callable[[NDArray[np.int64]], torch.Tensor], dimension: int
    ) -> tuple[Released[torch.Tensor], Private[Array]]:
        """Release the clipped sum of users' vectors, ``[users, dimension]``; return their norms."""
        contributions = batch.users.map(vectors)
        clipped = clipped_vectors(
            contributions.map(lambda of_users: [(np.arange(len(of_users)), of_users)]),
            dimension,
            extra=contributions.map(lambda of_users: np.zeros((len(of_users), 0))),
            extra_norm=0.0,
            clip_norm=run.plan.clip_norm,
            reduce=run.processes.sum,
            most_users=run.plan.users,
        )
        released = batch.release(clipped.bounded)
        return released, clipped.norms.map(lambda norms: norms[norms != 0])  # 0: no row can be read

    def _vectors(self, run: Run, scale: float, users: NDArray[np.int64]) -> torch.Tensor:
        encoded = self.encoded(run, users)
        ratios = log_ratio(run.policy, encoded, self.recipe.update.batch_size)
        counts = np.array(encoded.extra["counts"], dtype=np.float64)
        shares = (1 + counts / self.recipe.update.reward_range) / 2
        return of_users(encoded.user, encoded.users, ratios, shares, scale)

    def values(self, run: Run) -> dict[str, Value]:
        """Return what was released of the value of the tuned and of the logged policy, if any."""
        if not self._logged.rounds:
            return {}
        update = self.recipe.update
        size = run.plan.expected_batch_size
        return self._logged.estimates(size, update.baseline, update.reward_range)

    def write(self, run: Run, before: Losses, after: Losses) -> None:
        """Also write the value of the policy to ``evaluation.json`` and to the cards."""
        super().write(run, before, after)
        if values := self.values(run):
            file = run.folder.evaluation
            held = json.loads(file.read_text("utf-8")) if file.is_file() else {}
            write_json(file, held | {"value": {n: asdict(v) for n, v in values.items()}})
            note_value(run.folder, {n: str(v) for n, v in values.items()})

    def result(self, run: Run, before: Losses, after: Losses) -> FeedbackResult:
        """Return the tuned model, the guarantee, the public losses and the value of the policy."""
        return FeedbackResult(
            run.folder, run.plan, before, after, run.policy, value=self.values(run)
        )


@dataclass(frozen=True, repr=False)
class FeedbackResult(StageResult):
    """The result of a run on logged feedback.

    Attributes:
        value: What the logs say of the ``tuned`` and of the ``logged`` policy's value; empty
            without ``update.value_rounds``.
    """

    value: dict[str, Value] = field(default_factory=dict)

    @property
    def summary(self) -> list[tuple[str, str]]:
        """Also the value of both policies."""
        return [*super().summary, *((f"value, {n}", str(v)) for n, v in self.value.items())]
