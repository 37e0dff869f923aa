"""The recipe: strict, typed settings, read from YAML, from ``key=value`` overrides or from Python.

An unknown key or a bad value is refused before anything is loaded, with the nearest known key.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Adjacency, Partition

IN_MEMORY = "in-memory"
"""What a recipe written from Python calls data and rewards that only the program holds."""

R = typing.TypeVar("R", bound=BaseModel)

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _is_a_number(annotation: Any) -> bool:
    """Return whether a field takes an int or a float, perhaps among other things."""
    return annotation in (int, float) or any(map(_is_a_number, typing.get_args(annotation)))


class Settings(BaseModel):
    """Base of all settings: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, values: Any) -> Any:
        """Have ``true`` refused as a text where a number is wanted: pydantic would read 1."""
        if not isinstance(values, dict):
            return values
        numbers = {
            name for name, field in cls.model_fields.items() if _is_a_number(field.annotation)
        }
        return {
            key: str(value).lower() if isinstance(value, bool) and key in numbers else value
            for key, value in values.items()
        }


class Adapter(Settings):
    """The trainable part of the policy: a low-dimensional PEFT adapter.

    The noise grows with the root of the number of trained parameters.

    Attributes:
        type: ``lora`` trains A and B; ``lora-b`` freezes A and trains B alone; ``lora-xs`` an
            r × r matrix between singular directions; ``vera`` two vectors to each layer; ``ia3``
            scales; ``norms`` the norm layers; ``biases`` a bias to each output (see
            :mod:`dprlhf.policies.adapters`).
        rank: r, of the lora types and vera.
        alpha: of the lora types, whose scale is alpha / rank, or alpha / √rank with ``use_rslora``.
        use_rslora: see there (rsLoRA, arXiv 2312.03732).
        target_modules: module names as PEFT takes them; of lora types and vera also
            ``all-linear``. None takes PEFT's choice for the type of model.
        layers: adapt only these decoder layers (from 0; −1 is the last): fewer dimensions, and the
            backward pass stops at the lowest of them. None adapts all.
        init: of A: ``random`` (PEFT's), or ``public-activations``, the main directions of the
            layer's inputs on public prompts, along which users' gradients agree more.
    """

    type: Literal["lora", "lora-b", "lora-xs", "vera", "ia3", "norms", "biases"] = "lora-b"
    rank: PositiveInt = 1
    alpha: PositiveFloat = 1.0
    use_rslora: bool = False
    target_modules: list[str] | str | None = None
    layers: list[int] | None = None
    init: Literal["random", "public-activations"] = "random"

    @model_validator(mode="after")
    def _settings_of_type(self) -> Adapter:
        serves = {
            "rank": ("lora", "lora-b", "lora-xs", "vera"),
            "alpha": ("lora", "lora-b", "lora-xs"),
            "use_rslora": ("lora", "lora-b", "lora-xs"),
            "init": ("lora", "lora-b"),
        }
        for name, types_ in serves.items():
            changed = getattr(self, name) != type(self).model_fields[name].default
            if changed and self.type not in types_:
                raise ValueError(f"{name} is for type {', '.join(types_)}, not for {self.type}")
        return self


class Policy(Settings):
    """The language model that is trained.

    Attributes:
        model_name_or_path: a hub id, a folder, ``asset:…``, or an earlier stage's ``model/``.
        dtype: of the frozen base; the adapter stays in float32. ``auto`` is bfloat16 where the
            machine computes in it, else float32; a run keeps what it started with.
        trained_on_private_users: declare whether the base checkpoint was fitted on the same users
            without a stated cost. If it was, no ε can be stated for them, and only a non-private
            baseline will run.
        trust_remote_code: let the checkpoint bring code of its own, as transformers does.
        adapter: what of the model is trained.
    """

    model_name_or_path: str
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    trained_on_private_users: bool = False
    trust_remote_code: bool = False
    adapter: Adapter = Adapter()


class Data(Settings):
    """A prompt dataset: a hub id, a folder, a ``.csv``/``.jsonl``/``.parquet`` file, ``asset:…``.

    Attributes:
        path: where the rows are.
        name: the dataset's configuration name on the hub.
        split: which split of it (a file's or folder's file stem counts as a split).
        prompt_column: text, or a list of ``{"role", "content"}`` messages.
        user_column: rows with the same value are one user; None makes every row a user.
        max_prompts_per_user: further prompts of a user are dropped, in the order of the rows.
        prompt_words: keep the first so many words of a text prompt; None keeps all.
        max_prompt_tokens: keep the last so many tokens.
        skip: leave out the first so many rows.
        limit: use only the first so many rows of what is left.
    """

    path: str
    name: str | None = None
    split: str = "train"
    prompt_column: str = "prompt"
    user_column: str | None = None
    max_prompts_per_user: PositiveInt = 1
    prompt_words: PositiveInt | None = None
    max_prompt_tokens: PositiveInt = 64
    skip: Annotated[int, Field(ge=0)] = 0
    limit: PositiveInt | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a row must have, but for the user's."""
        return (self.prompt_column,)


class Documents(Data):
    """Documents to learn from, in TRL's formats.

    Attributes:
        completion_column: what is learnt, text or messages, after the prompt; None learns all of
            ``prompt_column``.
        max_completion_tokens: of what is learnt the first so many tokens count.
    """

    completion_column: str | None = "completion"
    max_completion_tokens: PositiveInt = 64

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a row must have, but for the user's."""
        return tuple(c for c in (self.prompt_column, self.completion_column) if c is not None)


class Preferences(Data):
    """Pairs of completions, the better one named; or texts with a label.

    Attributes:
        chosen_column: the better completion, text or messages.
        rejected_column: the other one.
        label_column: in place of pairs: which of ``labels`` the text of ``prompt_column`` has, by
            its number or its name.
        max_tokens: of a text; a longer one loses its start, or with labels its end.
    """

    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    label_column: str | None = None
    max_tokens: PositiveInt = 128

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a row must have, but for the user's."""
        if self.label_column is not None:
            return self.prompt_column, self.label_column
        return self.prompt_column, self.chosen_column, self.rejected_column


class Reward(Settings):
    """One reward: exactly one of ``function``, ``classifier`` and ``plugin``.

    Attributes:
        function: ``package.module:function`` or ``file.py:function``, with TRL's signature.
        classifier: a hub id or folder of a sequence classifier, or ``asset:…``.
        plugin: a name in the entry-point group ``dprlhf.rewards``.
        weight: of this reward in the sum.
        per_user: call it for one user's rows at a time; for rewards that compare rows.
        label: whose log-odds are a classifier's score; not with a single output.
        text: what a classifier reads.
        max_tokens: a classifier's texts are cut to so many.
        batch_size: texts that a classifier scores at once.
        trained_on_private_users: declare whether the reward was fitted on the same users without
            a stated cost; then no ε can be stated.
    """

    function: str | None = None
    classifier: str | None = None
    plugin: str | None = None
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    per_user: bool = False
    label: str | None = None
    text: Literal["prompt+completion", "completion"] = "prompt+completion"
    max_tokens: PositiveInt = 128
    batch_size: PositiveInt = 64
    trained_on_private_users: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Reward:
        if sum(x is not None for x in (self.function, self.classifier, self.plugin)) != 1:
            raise ValueError("give exactly one of function, classifier, plugin")
        return self


class Rollout(Settings):
    """How responses are sampled.

    Attributes:
        base_policy: μ of He & Zhou Algorithm 1: ``on-policy`` samples all responses from π_t;
            ``reference`` samples half of them from the base model (the adapter off).
        responses: responses a prompt; with ``reference``, half from each policy.
        max_new_tokens: the length of a response.
        temperature: of both policies; log-probabilities are taken at the same temperature.
        batch_size: responses sampled at once, always so many (fillers make up the rest): larger is
            faster until the fillers outnumber the responses. ``auto`` settles it once for a run:
            a round's responses, but at most 128 on a CPU and what fits into a GPU's memory.
        backend: ``transformers``, or ``vllm`` (``pip install 'dprlhf[vllm]'``, a GPU, one process,
            ``VLLM_BATCH_INVARIANT=1``); with ``vllm``, ``batch_size`` has no effect.
    """

    base_policy: Literal["on-policy", "reference"] = "on-policy"
    responses: Annotated[int, Field(ge=2)] = 2
    max_new_tokens: PositiveInt = 16
    temperature: PositiveFloat = 1.0
    batch_size: PositiveInt | Literal["auto"] = 128
    backend: Literal["transformers", "vllm"] = "transformers"

    @model_validator(mode="after")
    def _even(self) -> Rollout:
        if self.base_policy == "reference" and self.responses % 2:
            raise ValueError("responses must be even when base_policy is reference")
        return self


class TrustRegion(Settings):
    """A clip norm that keeps an SGD step in a region (see :mod:`dprlhf.trust_region`).

    Attributes:
        trust_region: ``l2``, ``l2-markov``, or ``kl``, which needs public prompts.
        alpha: α, the size of the region: ‖Δ‖²/2, or the KL divergence of responses.
        beta: β, the probability of leaving it.
    """

    trust_region: Literal["l2", "l2-markov", "kl"]
    alpha: PositiveFloat
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.1


def _clip_norm_kind(value: Any) -> str:
    return _REGION if isinstance(value, Mapping | TrustRegion) else _NUMBER


_NUMBER, _REGION = "number", "region"
ClipNorm = Annotated[
    Annotated[float, Field(gt=0), Tag(_NUMBER)] | Annotated[TrustRegion, Tag(_REGION)],
    Discriminator(_clip_norm_kind),
]


class _Update(Settings):
    """What all private updates share.

    Attributes:
        clip_norm: S, or the trust region that decides it once, before the first round; ``.inf``
            only in a non-private baseline.
        batch_size: responses differentiated at once; as for ``rollout.batch_size``.
    """

    clip_norm: ClipNorm = 1.0
    batch_size: PositiveInt = 64

    @model_validator(mode="before")
    @classmethod
    def _only_a_noised_critic(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "critic" in values:
            critic = values["critic"]
            name = critic.get("name", "noised") if isinstance(critic, Mapping) else critic
            offered = "critic" in cls.model_fields
            if offered and (critic is None or isinstance(critic, Critic)):
                return values
            if not offered or name != "noised":
                raise ValueError(
                    "there is no critic but critic: noised, with update.name pg, grpo or ppo: one"
                    " fitted without noise would carry a round's users into later releases"
                    " (docs/privacy.md, 'Rules that the code keeps'); or write baseline: loo, which"
                    " takes the user's own other responses"
                )
            if critic == "noised":
                return {**values, "critic": {}}
        return values

    @property
    def radius(self) -> float:
        """S; 1 until the trust region has decided it."""
        return 1.0 if isinstance(self.clip_norm, TrustRegion) else self.clip_norm

    @property
    def releases(self) -> int:
        """J, the noised sums that a round takes from its users."""
        return 1


class Critic(Settings):
    """A guess V(x) at a prompt's mean reward, learned from noised releases (see critic.py).

    Attributes:
        name: ``noised``; there is no other.
        share: of the round's budget 1/z². The gradient's noise-to-clip ratio grows by
            1/√(1 − share).
        features: p, numbers that V sees of a prompt, from public prompts; 0 makes V the released
            mean reward of earlier rounds. Noise in V grows with p.
        weight: of r − V(x) in an advantage; the rest is the baseline's.
        step_size: η, how much of V comes from the last round.
    """

    name: Literal["noised"] = "noised"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.02
    features: Annotated[int, Field(ge=0)] = 4
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    step_size: Annotated[float, Field(gt=0, le=1)] = 0.3


class _Score(_Update):
    """What the updates share that weigh ∇ log π by a ratio where y ~ μ ≠ π_t.

    Attributes:
        max_importance_ratio: truncation of π_t/μ, of a response or (grpo) of a token.
    """

    max_importance_ratio: PositiveFloat = 2.0


Baseline = Literal["paired", "loo", "group"]
"""Advantages, all inside one user's own responses."""


class _Advantage(_Score):
    """What the policy gradients share, whose advantages a critic may serve.

    Attributes:
        critic: ``noised``, or a mapping with its settings; None has no critic.
    """

    critic: Critic | None = None


class PG(_Advantage):
    """DP-PG (He & Zhou, Algorithm 2): the policy gradient.

    Attributes:
        name: ``pg``.
        baseline: ``loo`` takes the mean of the user's other responses off a reward, ``paired`` the
            other half's response, ``group`` standardises within the user.
    """

    name: Literal["pg"] = "pg"
    baseline: Baseline = "loo"


class GRPO(_Advantage):
    """DP-GRPO: group-relative advantages and the clipped ratio surrogate.

    Attributes:
        name: ``grpo``.
        clip_range: the surrogate's ratio is clipped to 1 ± this.
        scale_rewards: divide a group's advantages by its standard deviation.
    """

    name: Literal["grpo"]
    clip_range: PositiveFloat = 0.2
    scale_rewards: bool = True


class PPO(_Advantage):
    """DP-PPO (Rio et al., Algorithms 2 and 3): each user trains a copy, whose move is clipped.

    Attributes:
        name: ``ppo``.
        baseline: as for pg.
        epochs: E, passes over a user's own tokens.
        minibatches: parts that a user's tokens are split into; one local step on each.
        local_optimizer: ``adam`` starts from the released moments and is thrown away.
        local_learning_rate: the local step size.
        clip_range: clip the token ratio to 1 ± this; None leaves it (Rio et al., Remark 5.2).
    """

    name: Literal["ppo"]
    baseline: Baseline = "loo"
    epochs: PositiveInt = 1
    minibatches: PositiveInt = 1
    local_optimizer: Literal["sgd", "adam"] = "sgd"
    local_learning_rate: PositiveFloat = 0.1
    clip_range: Annotated[float, Field(gt=0, lt=1)] | None = None


class Oracle(Settings):
    """Private least squares, for NPG and REBEL; ``update.clip_norm`` bounds the features.

    Attributes:
        name: the algorithm, a file in ``regression/``.
        steps: J of ``projected-sgd`` and ``improper-batch-sgd``: noised releases in a round.
        step_size: of these two, in units of 1/``update.clip_norm``².
        radius: W, the bound on ‖w‖.
        target_bound: R; targets are clipped to ±R, and a gradient's bound is 2R times the clip
            norm. None takes the most that an advantage can be, 2 ``reward_range`` (3 with the
            baseline ``group``); less lowers the noise.
        sketch: dimensions of a public random projection of the features; None takes them as they
            are.
        ridge: regularisation of ``sufficient-statistics``, in units of its noise.
    """

    name: Literal["projected-sgd", "improper-batch-sgd", "sufficient-statistics"] = "projected-sgd"
    steps: PositiveInt = 4
    step_size: PositiveFloat = 0.5
    radius: PositiveFloat = 1.0
    target_bound: PositiveFloat | None = None
    sketch: PositiveInt | None = None
    ridge: PositiveFloat = 1.0

    @field_validator("name", mode="before")
    @classmethod
    def _gaussian(cls, name: Any) -> Any:
        why = {
            "exponential": "needs a finite set of candidates (W is infinite here) and is pure",
            "issp": "has to see all users together, works in few dimensions and is not Gaussian",
        }
        if name in why:
            raise ValueError(
                f"{name} {why[name]}, so a run cannot be charged for it: write projected-sgd, or"
                " call dprlhf.regression.fit on arrays"
            )
        return name

    @property
    def releases(self) -> int:
        """J, the noised sums that one regression takes."""
        return 1 if self.name == "sufficient-statistics" else self.steps


class REBEL(_Update):
    """DP-REBEL (He & Zhou, Algorithm 5): regress relative log-ratios on relative rewards.

    ``rollout.responses`` must be even: the two halves are paired.

    Attributes:
        name: ``rebel``.
        oracle: of ``gauss-newton``.
        eta: η of the loss ((1/η)(Δ(y) − Δ(y′)) − Â)².
        solver: ``gradient`` takes ``steps`` noised steps on the true loss; ``gauss-newton`` solves
            the linearised loss through ``oracle``.
        steps: J of the gradient solver.
    """

    name: Literal["rebel"]
    eta: PositiveFloat = 1.0
    solver: Literal["gradient", "gauss-newton"] = "gradient"
    steps: PositiveInt = 2
    oracle: Oracle = Oracle()

    @property
    def releases(self) -> int:
        """J, the noised sums that a round takes from its users."""
        return self.steps if self.solver == "gradient" else self.oracle.releases


class NPG(_Score):
    """DP-NPG (He & Zhou, Algorithm 3): regress advantages on ∇ log π, and step along w.

    Attributes:
        name: ``npg``.
        baseline: as for pg.
        oracle: how the regression is solved.
    """

    name: Literal["npg"]
    baseline: Baseline = "loo"
    oracle: Oracle = Oracle()

    @property
    def releases(self) -> int:
        """J, the noised sums that a round takes from its users."""
        return self.oracle.releases


def _update_name(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get("name", "pg")
    return getattr(value, "name", None)


Update = Annotated[
    Annotated[PG, Tag("pg")]
    | Annotated[GRPO, Tag("grpo")]
    | Annotated[PPO, Tag("ppo")]
    | Annotated[REBEL, Tag("rebel")]
    | Annotated[NPG, Tag("npg")],
    Discriminator(_update_name),
]


class KL(Settings):
    """The KL penalty: β (log π_t(y|x) − log π_ref(y|x)) off each response's own reward.

    π_ref is the policy with its adapter off. The rewards that a run reports stay without it.

    Attributes:
        beta: β; 0 is no penalty.
        level: ``sequence`` takes the whole penalty off a response's reward; ``token`` (with
            ``update.name: pg``) takes off at each token only what is still to come, which has the
            same mean and less variance.
    """

    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    level: Literal["sequence", "token"] = "sequence"


class Optimizer(Settings):
    """The server-side optimizer of the released mean gradient (post-processing).

    Attributes:
        name: ``sgd``, ``adam``, or ``adam-corrected``: Adam whose second moment has the variance of
            the noise, which is public, taken off.
        learning_rate: its step size; the largest of the schedule.
        momentum: of SGD.
        betas: of Adam.
        eps: of Adam.
        noise_floor: of ``adam-corrected``: its corrected second moment is at least this share of
            the noise's variance.
        schedule: how the learning rate falls over the rounds, to nearly 0 with ``linear`` and
            ``cosine``.
        warmup: the share of the rounds in which the learning rate first rises, in equal steps.
    """

    name: Literal["sgd", "adam", "adam-corrected"] = "adam"
    learning_rate: PositiveFloat = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    noise_floor: PositiveFloat = 0.1
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Budget(Settings):
    """What is promised: give ``epsilon`` or ``noise_multiplier``, not both.

    Attributes:
        epsilon: ε to keep within; ``.inf`` is a non-private baseline.
        noise_multiplier: z, in place of ε, which then follows from it.
        delta: δ; keep it well below 1 / users.
        partition: how users are spread over the rounds.
        adjacency: what neighbouring datasets are; None takes ``add-remove``, or ``zero-out`` for
            ``fixed`` and ``stream``.
        participations: rounds that a user takes part in (poisson: on average).
        bands: above 1, with partition ``fixed`` or ``stream``, correlates the noise of so many
            rounds (see :mod:`dprlhf.privacy.correlated`).
        tuning_runs: declares how many runs on the same users chose these settings. Each counts as a
            run with this one's noise and rounds, so give it no less noise; name runs of other terms
            under ``previous``. None declares nothing.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    partition: Partition = "random-allocation"
    adjacency: Adjacency | None = None
    participations: PositiveInt = 1
    bands: PositiveInt = 1
    tuning_runs: Annotated[int, Field(ge=0)] | None = None

    @property
    def baseline(self) -> bool:
        """Whether no noise is asked for."""
        return self.epsilon == math.inf or self.noise_multiplier == 0

    @model_validator(mode="after")
    def _valid(self) -> Budget:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give exactly one of epsilon and noise_multiplier")
        if self.epsilon is not None and not self.epsilon > 0:
            raise ValueError(f"epsilon must be above 0, not {self.epsilon}")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be at least 0, not {self.noise_multiplier}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, not {self.delta}")
        return self


class Privacy(Budget):
    """The budget of the updates, and what of it the noised reward takes.

    Attributes:
        reward_share: the share of the clip norm that a scaled copy of the user's mean reward may
            take in the released vector; 0 turns the noised reward in the metrics off.
    """

    reward_share: Annotated[float, Field(ge=0, lt=1)] = 0.14


class Evaluation(Settings):
    """Evaluation on public prompts, which costs no privacy.

    Attributes:
        data: the public prompts.
        prompts: how many of them, from the start; at least 2, for a standard error.
        every: evaluate after every so many rounds; None evaluates before and after only.
    """

    data: Data
    prompts: Annotated[int, Field(ge=2)] = 256
    every: PositiveInt | None = None


class Tracking(Settings):
    """Experiment trackers, which get the lines of ``metrics.jsonl`` (see :mod:`dprlhf.trackers`).

    Attributes:
        report_to: which; each is a package of its own to install.
        project: what the trackers file the run under.
        live: send each round when it ends, not all at the end of the run. The service then knows
            how long each round took, hence about how many users it had.
    """

    report_to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    project: str = "dprlhf"
    live: bool = False

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_several(cls, names: Any) -> Any:
        return [] if names == "none" else [names] if isinstance(names, str) else names


class Previous(Settings):
    """An earlier private run that this one builds on, or that had some of the same users.

    Attributes:
        run: its folder.
        users: ``shared`` (some may be the same: the costs compose) or ``disjoint`` (nobody is in
            both: the larger cost counts). ``disjoint`` is refused where the two runs' ``secret/``
            shows that it is wrong; that nothing is found proves nothing, so it is your statement.
    """

    run: str
    users: Literal["shared", "disjoint"] = "shared"


class Recipe(Settings):
    """All settings of a run.

    Attributes:
        policy: the model that is trained.
        data: the users' prompts.
        rewards: one or several; their weighted sum counts.
        reward_range: R; the sum is clipped to ±R.
        rollout: how responses are sampled.
        update: the algorithm.
        kl: the penalty for leaving the base model.
        optimizer: what steps along the released gradient.
        privacy: what is promised.
        rounds: T.
        evaluation: public prompts, for the reward before, during and after.
        tracking: experiment trackers.
        previous: earlier runs on the same users, or whose models this one uses.
        seed: of the adapter's start and the public continuations. Allocation, noise and the private
            responses come from the run's own secret key, never from a seed.
        output_dir: the run folder; None makes one under ``runs/``.
    """

    policy: Policy
    data: Data
    rewards: Annotated[list[Reward], Field(min_length=1)]
    reward_range: PositiveFloat = 3.0
    rollout: Rollout = Rollout()
    update: Update = PG()
    kl: KL = KL()
    optimizer: Optimizer = Optimizer()
    privacy: Privacy
    rounds: PositiveInt
    evaluation: Evaluation | None = None
    tracking: Tracking = Tracking()
    previous: list[Previous] = []
    seed: int = 0
    output_dir: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        baseline = self.privacy.baseline
        if math.isinf(self.update.radius) and not baseline:
            raise ValueError("update.clip_norm must be finite unless privacy.epsilon is .inf")
        regression = isinstance(self.update, NPG) or (
            isinstance(self.update, REBEL) and self.update.solver == "gauss-newton"
        )
        if regression and math.isinf(self.update.radius):
            raise ValueError(
                "update.clip_norm bounds the features of the regression: give a finite one, also"
                " with privacy.epsilon .inf"
            )
        if regression and self.optimizer.name == "adam-corrected":
            raise ValueError(
                "optimizer.name: adam-corrected needs the noise of a released gradient, and"
                f" update.name {self.update.name} steps along a regression's solution: write sgd"
            )
        if self.privacy.bands > 1 and self.optimizer.name == "adam-corrected":
            raise ValueError(
                "optimizer.name: adam-corrected takes every round's noise to be the same, which"
                " privacy.bands above 1 changes: write sgd or adam"
            )
        self._check_trust_region()
        self._check_critic()
        if self.kl.level == "token" and self.update.name != "pg":
            raise ValueError(
                f"kl.level: token works with update.name pg; {self.update.name} takes one reward a"
                " response: write kl.level: sequence"
            )
        if self.update.name == "rebel" and self.rollout.responses % 2:
            raise ValueError(
                "rollout.responses must be even for update.name rebel, which pairs them, not"
                f" {self.rollout.responses}"
            )
        if self.policy.adapter.init == "public-activations" and self.evaluation is None:
            raise ValueError(
                "policy.adapter.init: public-activations needs public prompts (evaluation.data)"
            )
        if self.evaluation is not None and _same_rows(self.data, self.evaluation.data):
            raise ValueError(
                "evaluation.data names the private users: evaluation writes prompts and rewards in"
                " the open, so it needs public prompts"
            )
        fitted = self.policy.trained_on_private_users or any(
            r.trained_on_private_users for r in self.rewards
        )
        if fitted and not baseline:
            raise ValueError(
                "trained_on_private_users: the policy or a reward was fitted on the same users"
                " without a stated privacy cost, so no epsilon can be stated; use a checkpoint"
                " that never saw them, or privacy.epsilon=.inf for a non-private baseline"
            )
        return self

    def _check_critic(self) -> None:
        critic = getattr(self.update, "critic", None)
        if critic is None:
            return
        if getattr(self.update, "scale_rewards", False) or (
            getattr(self.update, "baseline", None) == "group"
        ):
            setting = "scale_rewards: false" if self.update.name == "grpo" else "baseline: loo"
            raise ValueError(
                "update.critic: V(x) is in the unit of rewards, and standardised advantages have"
                f" none: write {setting}"
            )
        if critic.features and self.evaluation is None:
            raise ValueError(
                "update.critic: features come from public prompts (evaluation.data): give some, or"
                " write features: 0"
            )
        if self.privacy.reward_share**2 + critic.share >= 1:
            raise ValueError(
                "update.critic.share and the square of privacy.reward_share leave nothing to the"
                " gradient: lower them"
            )

    def _check_trust_region(self) -> None:
        region = self.update.clip_norm
        if not isinstance(region, TrustRegion):
            return
        if self.update.name not in ("pg", "grpo", "ppo"):
            raise ValueError(
                "update.clip_norm: a trust region is for the one step of pg, grpo or ppo, not for"
                f" {self.update.name}: give a number"
            )
        if self.optimizer.name != "sgd" or self.optimizer.momentum:
            raise ValueError(
                "update.clip_norm: a trust region bounds a plain SGD step: write optimizer: {name:"
                " sgd, learning_rate: …} without momentum, or give a number"
            )
        if region.trust_region == "kl" and self.evaluation is None:
            raise ValueError(
                "update.clip_norm: trust_region kl needs public prompts (evaluation.data); l2 and"
                " l2-markov do not"
            )


def _same_rows(a: Data, b: Data) -> bool:
    return a.path != IN_MEMORY and (a.path, a.name, a.split) == (b.path, b.name, b.split)


class Supervised(Settings):
    """How a stage turns its users into one release a round.

    Attributes:
        clip_norm: S; ``.inf`` only in a non-private baseline.
        batch_size: rows differentiated at once.
    """

    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    batch_size: PositiveInt = 32

    @property
    def radius(self) -> float:
        """S."""
        return self.clip_norm

    @property
    def releases(self) -> int:
        """J, the noised sums that a round takes from its users."""
        return 1


class _Stage(Settings):
    """What the supervised stages share.

    Attributes:
        stage: ``sft`` or ``reward``.
        policy: the model that is trained.
        data: the users' rows.
        update: clipping.
        optimizer: what steps along the released gradient.
        privacy: what is promised.
        rounds: T.
        evaluation: public rows, for the loss before, during and after.
        tracking: experiment trackers.
        previous: earlier runs on the same users, or whose models this one uses.
        seed: of the adapter's (and a fresh head's) start.
        output_dir: the run folder; None makes one under ``runs/``.
    """

    update: Supervised = Supervised()
    optimizer: Optimizer = Optimizer()
    privacy: Budget
    rounds: PositiveInt
    tracking: Tracking = Tracking()
    previous: list[Previous] = []
    seed: int = 0
    output_dir: str | None = None

    def _check(self, trained: Policy, data: Data, public: Data | None) -> None:
        baseline = self.privacy.baseline
        if math.isinf(self.update.clip_norm) and not baseline:
            raise ValueError("update.clip_norm must be finite unless privacy.epsilon is .inf")
        if self.privacy.bands > 1 and self.optimizer.name == "adam-corrected":
            raise ValueError(
                "optimizer.name: adam-corrected takes every round's noise to be the same, which"
                " privacy.bands above 1 changes: write sgd or adam"
            )
        if public is not None and _same_rows(data, public):
            raise ValueError(
                "evaluation.data names the private users: evaluation is published, so it needs"
                " public rows"
            )
        if trained.trained_on_private_users and not baseline:
            raise ValueError(
                "trained_on_private_users: the model was fitted on the same users without a stated"
                " privacy cost, so no epsilon can be stated; use a checkpoint that never saw them,"
                " or privacy.epsilon=.inf for a non-private baseline"
            )


class DocumentsEvaluation(Settings):
    """The loss on public documents.

    Attributes:
        data: the public rows.
        prompts: how many of them, from the start; at least 2, for a standard error.
        every: evaluate after every so many rounds; None evaluates before and after only.
    """

    data: Documents
    prompts: Annotated[int, Field(ge=2)] = 256
    every: PositiveInt | None = None


class SFTRecipe(_Stage):
    """All settings of ``dprlhf sft``: supervised fine-tuning on the users' own documents."""

    stage: Literal["sft"] = "sft"
    policy: Policy
    data: Documents
    evaluation: DocumentsEvaluation | None = None

    @property
    def trained(self) -> Policy:
        """The model that is trained."""
        return self.policy

    @model_validator(mode="after")
    def _consistent(self) -> SFTRecipe:
        self._check(self.policy, self.data, self.evaluation.data if self.evaluation else None)
        if self.policy.adapter.init == "public-activations" and self.evaluation is None:
            raise ValueError(
                "policy.adapter.init: public-activations needs public documents (evaluation.data)"
            )
        return self


class PreferencesEvaluation(Settings):
    """The loss on public pairs or labels.

    Attributes:
        data: the public rows.
        prompts: how many of them, from the start; at least 2, for a standard error.
        every: evaluate after every so many rounds; None evaluates before and after only.
    """

    data: Preferences
    prompts: Annotated[int, Field(ge=2)] = 256
    every: PositiveInt | None = None


class RewardRecipe(_Stage):
    """All settings of ``dprlhf reward``: a reward model from preference pairs or labels.

    Attributes:
        model: an encoder or a causal LM, which gets a classification head.
        labels: the names of the labels, with ``data.label_column``.
    """

    stage: Literal["reward"] = "reward"
    model: Policy
    data: Preferences
    labels: list[str] | None = None
    evaluation: PreferencesEvaluation | None = None

    @property
    def trained(self) -> Policy:
        """The model that is trained."""
        return self.model

    @model_validator(mode="after")
    def _consistent(self) -> RewardRecipe:
        self._check(self.model, self.data, self.evaluation.data if self.evaluation else None)
        if (self.data.label_column is None) != (self.labels is None):
            raise ValueError("labels and data.label_column: give both, or neither for pairs")
        if self.labels is not None and len(set(self.labels)) < max(2, len(self.labels)):
            raise ValueError("labels: give at least two, each once")
        if self.evaluation and (self.evaluation.data.label_column is None) != (self.labels is None):
            raise ValueError("evaluation.data must have what data has: labels, or else pairs")
        if self.model.dtype != "float32":
            raise ValueError("model.dtype: a reward model is trained in float32")
        if self.model.adapter.init != "random":
            raise ValueError(
                "model.adapter.init: public-activations is for causal LMs: write random"
            )
        return self


AnyRecipe = Recipe | SFTRecipe | RewardRecipe

STAGES: dict[str, type[SFTRecipe] | type[RewardRecipe]] = {
    "sft": SFTRecipe,
    "reward": RewardRecipe,
}
"""The supervised stages by name; a recipe without a ``stage`` is one of private updates."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe and apply ``section.key=value`` overrides.

    Raises:
        DprlhfError: the file cannot be read, or a key or value is wrong.
    """
    recipe = load_any_recipe(path, overrides)
    if not isinstance(recipe, Recipe):
        raise DprlhfError(
            f"{path}: a recipe of stage {recipe.stage}: run it with dprlhf {recipe.stage} {path}"
        )
    return recipe


def load_any_recipe(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read a YAML recipe of any stage, as :func:`load_recipe` does."""
    path = Path(path)
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise DprlhfError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DprlhfError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise DprlhfError(f"{path}: a recipe is a mapping of keys to values")
    for override in overrides:
        _override(settings, override)
    stage = settings.get("stage")
    if stage is None:
        return _make(Recipe, settings, str(path))
    if stage not in STAGES:
        names = ", ".join(STAGES)
        raise DprlhfError(f"{path}: {_refused('stage', f'it is one of {names}', stage, names)}")
    return _make(STAGES[stage], settings, str(path))


def make_recipe(settings: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Validate settings; errors name the key, what is allowed, and the nearest known key."""
    return _make(Recipe, settings, source)


def _make(kind: type[R], settings: Mapping[str, Any], source: str) -> R:
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise DprlhfError(f"{source}: {_explain(error, kind)}") from None


def dump_recipe(recipe: AnyRecipe) -> str:
    """Return the recipe as YAML, every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _override(settings: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise DprlhfError(f"override '{override}': write section.key=value")
    *parents, last = key.split(".")
    node: Any = settings
    for parent in parents:
        child = _item(node, parent, key) if isinstance(node, list) else node.setdefault(parent, {})
        if child is None:
            child = node[int(parent) if isinstance(node, list) else parent] = {}
        if not isinstance(child, dict | list):
            raise DprlhfError(f"override '{key}': '{parent}' is a single value, not a section")
        node = child
    value = _parse(text, override)
    if isinstance(node, list):
        _item(node, last, key)
        node[int(last)] = value
    else:
        node[last] = value


def _item(node: list[Any], index: str, key: str) -> Any:
    if not index.isdecimal() or int(index) >= len(node):
        raise DprlhfError(f"override '{key}': '{index}' is not an index of a list of {len(node)}")
    return node[int(index)]


def _parse(text: str, override: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise DprlhfError(f"override '{override}': the value is not valid YAML") from None
    if isinstance(value, str):
        try:  # YAML reads 1e-3 and inf as text
            return float(value)
        except ValueError:
            return value
    return value


def _explain(error: ValidationError, kind: type[BaseModel] = Recipe) -> str:
    problems = error.errors()
    # A misspelt required key is missing and unknown at once; the second says more.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    location = [str(part) for part in first["loc"]]
    if location[:1] == ["update"] and kind is Recipe:
        if first["type"] == "union_tag_invalid":
            names = first["ctx"]["expected_tags"]
            return _refused("update.name", f"Input should be {names}", first["ctx"]["tag"], names)
        del location[1:2]  # the update's name, which pydantic puts before its keys
        location = [part for part in location if part not in (_NUMBER, _REGION)]
    key = ".".join(location) or "recipe"
    if first["type"] == "extra_forbidden":
        nearest = _nearest_key(location, kind)
        return f"unknown key '{key}'" + (f"; did you mean '{nearest}'?" if nearest else "")
    if first["type"] == "missing":
        return f"'{key}' is missing"
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    if isinstance(given, dict | list | BaseModel):
        return f"{key}: {message}"
    return _refused(key, message, given, first.get("ctx", {}).get("expected", ""))


def _refused(key: str, message: str, given: Any, choices: Any) -> str:
    listed = [word.strip("' ") for word in str(choices).replace(" or ", ",").split(",")]
    near = difflib.get_close_matches(str(given), listed, 1)
    return f"{key}: {message}, not {given!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _nearest_key(location: list[str], kind: type[BaseModel]) -> str | None:
    """Return the most alike key of the same section, else of any."""
    *section, last = location
    plain = [part for part in section if not part.isdecimal()]
    known = [key.split(".") for key in _known_keys(kind)]
    siblings = [key[-1] for key in known if key[:-1] == plain]
    anywhere = {key[-1]: ".".join(key) for key in reversed(known)}
    if last in anywhere:
        return anywhere[last]
    if near := difflib.get_close_matches(last, siblings, 1):
        return ".".join([*section, near[0]])
    near = difflib.get_close_matches(last, anywhere, 1)
    return anywhere[near[0]] if near else None


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in _models_in(field.annotation):
            yield from _known_keys(part, f"{prefix}{name}.")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (types.UnionType, typing.Union, Annotated, list):
        for part in typing.get_args(annotation):
            yield from _models_in(part)
