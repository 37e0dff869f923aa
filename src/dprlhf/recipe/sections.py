"""The sections that recipes share; the section ``update`` is in :mod:`dprlhf.recipe.updates`."""

from __future__ import annotations

import math
import os
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dprlhf.privacy.accounting import Adjacency, Partition
from dprlhf.recipe.adapters import ADAPTERS, FORMER_NAMES, AdapterType
from dprlhf.recipe.base import (
    IN_MEMORY,
    Experimental,
    PositiveFloat,
    PositiveInt,
    Settings,
    note_new_name,
)

Beta = Annotated[float, Field(ge=0, lt=1)]

_UNMEASURED = Experimental(tuple(name for name, kind in ADAPTERS.items() if kind.experimental))


@dataclass(frozen=True)
class Source:
    """A model that a run starts from: what it trains, or a reward.

    Attributes:
        key: The recipe's key that names it; None where the model is not a file or hub id.
        label: What the privacy card calls it.
        path: Hub id or folder; empty for a reward that is a function.
        trained_on_private_users: Whether the recipe declares that it was fitted on the same users.
    """

    key: str | None
    label: str
    path: str
    trained_on_private_users: bool


class Adapter(Settings):
    """The trainable part of the policy: a low-dimensional PEFT adapter.

    The norm of a release's noise grows with the square root of the number of trained parameters, so
    this section decides utility first. :mod:`dprlhf.policies.adapters` has each type's paper.

    Attributes:
        type: ``lora`` trains both factors A and B of LoRA; ``ffa-lora`` (formerly ``lora-b``)
            freezes A and trains B alone. Experimental: ``lora-xs`` trains an r × r matrix between
            singular directions of the weight; ``vera`` two vectors in each layer; ``ia3`` scales of
            activations; ``norms`` the norm layers; ``biases`` a bias of each output.
        rank: Rank r of the LoRA types and of ``vera``.
        alpha: LoRA's alpha: the adapter's output is scaled by alpha / rank, or by alpha / √rank
            with ``use_rslora``. For the LoRA types.
        use_rslora: Scale the output by alpha / √rank (rsLoRA, arXiv 2312.03732). For the LoRA
            types.
        target_modules: Names of the adapted modules, as PEFT takes them; for the LoRA types and
            ``vera`` also ``all-linear``. Null takes PEFT's choice for the model's architecture.
        layers: Adapt only these decoder layers (from 0; −1 is the last): fewer dimensions, and the
            backward pass stops at the lowest of them. Null adapts all layers.
        init: Initial value of A: ``random`` as in PEFT, or ``public-activations``, the principal
            directions of the layer's inputs on public prompts, along which the gradients of
            different users agree more. For ``lora`` and ``ffa-lora``.
    """

    type: Annotated[AdapterType, _UNMEASURED] = "ffa-lora"
    rank: PositiveInt = 1
    alpha: PositiveFloat = 1.0
    use_rslora: bool = False
    target_modules: list[str] | str | None = None
    layers: list[int] | None = None
    init: Literal["random", "public-activations"] = "random"

    @field_validator("type", mode="before")
    @classmethod
    def _todays_name(cls, name: Any) -> Any:
        if isinstance(name, str) and name in FORMER_NAMES:
            note_new_name("policy.adapter.type", name, FORMER_NAMES[name])
            return FORMER_NAMES[name]
        return name

    @model_validator(mode="after")
    def _settings_of_type(self) -> Adapter:
        for name in ("rank", "alpha", "use_rslora", "init"):
            changed = getattr(self, name) != type(self).model_fields[name].default
            if changed and name not in ADAPTERS[self.type].takes:
                types_ = ", ".join(t for t, kind in ADAPTERS.items() if name in kind.takes)
                raise ValueError(f"{name} is for type {types_}, not for {self.type}")
        return self

    def check(self, *, public_rows: bool) -> None:
        """Refuse an initial value that needs public rows where the recipe has none.

        Raises:
            ValueError: Names the setting.
        """
        if self.init == "public-activations" and not public_rows:
            raise ValueError(
                "policy.adapter.init: public-activations needs public rows (evaluation.data)"
            )


class Policy(Settings):
    """The language model that is trained.

    Attributes:
        model_name_or_path: Hub id, folder, ``asset:…``, or the ``model/`` of an earlier stage.
        revision: Branch, tag or commit of a hub id. Give the commit, so that a later run loads the
            same weights; null takes what the hub has now.
        dtype: Data type of the frozen base model; the adapter stays in float32. ``auto`` is
            bfloat16 where the hardware computes in it, else float32; a run keeps the type that it
            started with.
        attn_implementation: Attention implementation of transformers; null takes its default.
            ``eager`` can be faster for short texts on a CPU; its memory grows with the square of
            their length. FlashAttention is not offered: it packs the rows of a micro-batch into
            one, where the rounding of one user's values would depend on the other users.
        trained_on_private_users: Declares that the base checkpoint was fitted on the same users
            without a stated privacy cost. Then no ε can be stated for them, and only a non-private
            baseline runs.
        trust_remote_code: Run code that the checkpoint brings, as in transformers.
        adapter: The trainable part of the model.
    """

    model_name_or_path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    attn_implementation: Literal["sdpa", "eager"] | None = None
    trained_on_private_users: bool = False
    trust_remote_code: bool = False
    adapter: Adapter = Adapter()

    def source(self, key: str) -> Source:
        """Return where the base model comes from; ``key`` is this section's name."""
        path = self.model_name_or_path
        return Source(
            f"{key}.model_name_or_path", f"base model {path}", path, self.trained_on_private_users
        )


class Data(Settings):
    """A prompt dataset: a hub id, a folder, a ``.csv``/``.jsonl``/``.parquet`` file, ``asset:…``.

    Attributes:
        path: Hub id, folder or file of the rows.
        name: Name of the dataset's configuration on the hub.
        revision: Branch, tag or commit of the dataset on the hub; null takes what the hub has now.
        split: Split of the dataset. In a folder of files, the file's name without its suffix.
        prompt_column: Column of the prompts: text, or a list of ``{"role", "content"}`` messages.
        user_column: Column that identifies the user: rows with the same value belong to one user.
            Null makes every row a user of its own.
        max_prompts_per_user: Number of prompts that a user keeps: the first ones, in the order of
            the rows. Further ones are dropped.
        prompt_words: Keep only this many words from the start of a text prompt; null keeps all.
        max_prompt_tokens: Keep only this many tokens from the end of a prompt.
        skip: Number of rows at the start that are left out.
        limit: Number of rows after these that are used; null uses all.
    """

    path: str
    name: str | None = None
    revision: str | None = None
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
        """Names of the columns that every row must have, without the user column."""
        return (self.prompt_column,)


class Documents(Data):
    """Documents for supervised fine-tuning, in TRL's formats.

    Attributes:
        completion_column: Column of the completions, text or messages, on which the loss is taken.
            Null takes the loss on the whole of ``prompt_column``, as in language modeling.
        max_completion_tokens: Keep only this many tokens from the start of a completion.
    """

    completion_column: str | None = "completion"
    max_completion_tokens: PositiveInt = 64

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that every row must have, without the user column."""
        return tuple(c for c in (self.prompt_column, self.completion_column) if c is not None)


class Preferences(Data):
    """Preference pairs (a chosen and a rejected completion), or texts with a label.

    Attributes:
        chosen_column: Column of the better completions, text or messages.
        rejected_column: Column of the worse completions, text or messages.
        label_column: Column of the labels of the texts in ``prompt_column``, each a number or a
            name from ``labels``; given in place of pairs.
        max_tokens: Keep only this many tokens of a text: the last ones, or with labels the first.
    """

    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    label_column: str | None = None
    max_tokens: PositiveInt = 128

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that every row must have, without the user column."""
        if self.label_column is not None:
            return self.prompt_column, self.label_column
        return self.prompt_column, self.chosen_column, self.rejected_column


class Reward(Settings):
    """One reward; give exactly one of ``function``, ``classifier`` and ``plugin``.

    Attributes:
        function: ``package.module:function`` or ``file.py:function``, with TRL's signature.
        classifier: Hub id or folder of a sequence classifier, or ``asset:…``.
        revision: Branch, tag or commit of the classifier's hub id; null takes what the hub has now.
        plugin: Name in the entry-point group ``dprlhf.rewards`` of an installed package.
        weight: Weight of this reward in the sum.
        times_column: Column of the dataset with a number by which each score is multiplied, such as
            1 for a user who wants more of it and −1 for one who wants less; null for none. Where
            the column has no number the row gets no score.
        per_user: Call the reward for one user's rows at a time; for rewards that compare rows.
        label: Label whose log-odds are the classifier's score; not for a classifier with one
            output.
        text: What the classifier reads: the prompt with the completion, or the completion alone.
        max_tokens: Number of tokens to which the classifier's texts are truncated.
        batch_size: Number of texts that the classifier scores at once.
        trained_on_private_users: Declares that the reward was fitted on the same users without a
            stated privacy cost. Then no ε can be stated.
    """

    function: str | None = None
    classifier: str | None = None
    revision: str | None = None
    plugin: str | None = None
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    times_column: str | None = None
    per_user: bool = False
    label: str | None = None
    text: Literal["prompt+completion", "completion"] = "prompt+completion"
    max_tokens: PositiveInt = 128
    batch_size: PositiveInt = 64
    trained_on_private_users: bool = False

    @property
    def name(self) -> str:
        """What the recipe calls the reward."""
        return str(self.function or self.classifier or self.plugin)

    def source(self, key: str) -> Source:
        """Return where the reward comes from; ``key`` is this section's name."""
        return Source(
            f"{key}.classifier" if self.classifier else None,
            f"reward {self.name}",
            self.classifier or "",
            self.trained_on_private_users,
        )

    @model_validator(mode="after")
    def _one_source(self) -> Reward:
        if sum(x is not None for x in (self.function, self.classifier, self.plugin)) != 1:
            raise ValueError("give exactly one of function, classifier, plugin")
        if self.revision is not None and self.classifier is None:
            raise ValueError("revision is for a classifier, not for a function or plugin")
        return self


class Rollout(Settings):
    """How responses are sampled.

    Attributes:
        base_policy: Sampling policy μ of He & Zhou 2025, Algorithm 1: ``on-policy`` samples all
            responses from the current policy π_t; ``reference`` samples half of them from the base
            model (the adapter switched off).
        responses: Number of responses to each prompt; with ``reference``, half from each policy.
        max_new_tokens: Number of tokens of a response, at most.
        temperature: Sampling temperature of both policies. Log-probabilities are taken at the same
            temperature.
        batch_size: Number of responses that are sampled at once; dummy prompts fill up an
            incomplete batch, so that its shape says nothing about the users. Larger is faster until
            the dummies outnumber the responses. ``auto`` determines it once for a run: a round's
            expected responses, but at most 128 on a CPU and what fits into a GPU's memory.
        backend: ``transformers``, or experimental ``vllm`` (``pip install -e '.[vllm]'`` in the
            clone, a GPU, one process, ``VLLM_BATCH_INVARIANT=1``), which ignores ``batch_size``.
    """

    base_policy: Literal["on-policy", "reference"] = "on-policy"
    responses: Annotated[int, Field(ge=2)] = 2
    max_new_tokens: PositiveInt = 16
    temperature: PositiveFloat = 1.0
    batch_size: PositiveInt | Literal["auto"] = 128
    backend: Annotated[Literal["transformers", "vllm"], Experimental(("vllm",))] = "transformers"

    @model_validator(mode="after")
    def _even(self) -> Rollout:
        if self.base_policy == "reference" and self.responses % 2:
            raise ValueError("responses must be even when base_policy is reference")
        return self


class KL(Settings):
    """The KL penalty: subtracts β (log π_t(y|x) − log π_ref(y|x)) from each response's reward.

    The reference policy π_ref is the policy with its adapter switched off. The rewards that a run
    reports are those without the penalty.

    Attributes:
        beta: Coefficient β, in units of the reward per nat; 0 for no penalty.
        level: ``sequence`` subtracts the whole penalty from a response's reward; ``token`` (with
            ``update.name: pg``) subtracts at each token only the penalty of the tokens from there
            on, which has the same expectation and less variance.
    """

    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    level: Literal["sequence", "token"] = "sequence"


class Average(Settings):
    """The policy that a run leaves is an average over rounds; give exactly one of the keys.

    Attributes:
        tail: Share of the rounds, from the last one back, whose parameters count alike.
        decay: Decay β of an exponential average over all rounds, with bias correction: the
            parameters of n rounds ago count β^n as much as the last.
    """

    tail: Annotated[float, Field(gt=0, le=1)] | None = None
    decay: Beta | None = None

    @model_validator(mode="after")
    def _one(self) -> Average:
        if (self.tail is None) == (self.decay is None):
            raise ValueError("give exactly one of tail and decay")
        return self


class Optimizer(Settings):
    """The server-side optimizer, which steps along the released gradient (post-processing).

    Attributes:
        name: ``sgd``; ``normalized-sgd``: SGD whose step has a fixed length along the momentum
            (arXiv 2002.03305); ``adam``; or ``adam-corrected``: Adam with the public variance of
            the noise subtracted from its second moment (DP-AdamBC, arXiv 2312.14334).
        learning_rate: Step size; with a schedule, its largest value. For ``normalized-sgd`` the L2
            length of a step, over all trained parameters together.
        momentum: Momentum μ of ``sgd`` and ``normalized-sgd``.
        betas: Decay rates (β₁, β₂) of Adam's moments.
        eps: Adam's ε, which keeps the denominator away from 0.
        noise_floor: Lower bound on the corrected second moment of ``adam-corrected``, as a share of
            the noise's variance.
        schedule: How the learning rate falls over the rounds: not at all, or to nearly 0 along a
            line or a cosine.
        warmup: Share of the rounds in which the learning rate rises linearly first.
        average: Evaluate and save an average of the parameters over rounds, while training goes on
            with the last ones. Null takes the last ones for both.
    """

    name: Literal["sgd", "normalized-sgd", "adam", "adam-corrected"] = "adam"
    learning_rate: PositiveFloat = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    noise_floor: PositiveFloat = 0.1
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    average: Average | None = None


class Budget(Settings):
    """The privacy guarantee; give exactly one of ``epsilon`` and ``noise_multiplier``.

    Attributes:
        epsilon: Largest ε that the run may spend; ``.inf`` is a non-private baseline.
        noise_multiplier: Noise multiplier z, the noise's standard deviation in units of the clip
            norm; ε then follows from it.
        delta: δ; keep it well below 1 / (number of users).
        partition: How users are assigned to rounds: ``random-allocation``, ``fixed``, ``stream`` or
            ``poisson`` (Poisson subsampling).
        adjacency: How neighbouring datasets differ: ``zero-out`` (null takes it), a user's data
            replaced by nothing, or ``replace-one``, by another user's. ``add-remove`` is refused
            for a run, which publishes its number of users.
        participations: Number of rounds in which a user takes part (with ``poisson``: on average).
        bands: Number of rounds whose noise is correlated, so that later rounds take back noise of
            earlier ones (matrix factorization, DP-FTRL); 1 is independent noise. Above 1 not with
            ``poisson``, and with ``random-allocation`` for one participation, ``zero-out`` and up
            to 128 rounds (see :mod:`dprlhf.privacy.correlated_noise`).
        tuning_runs: Declares how many runs on the same users chose these settings. Each counts as
            a run with this one's noise and rounds, so give it no less noise; name runs with other
            settings under ``previous``. Null declares nothing.
        book: Budget book that counts what the users spend over all runs: a SQLite file, or
            ``postgresql://HOST/DATABASE`` without a password. Null takes the environment variable
            ``DPRLHF_BOOK``; ``none`` is no book.
        dataset: Name of the users' data set in the book; null takes the book's only one.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    partition: Partition = "random-allocation"
    adjacency: Adjacency | None = None
    participations: PositiveInt = 1
    bands: PositiveInt = 1
    tuning_runs: Annotated[int, Field(ge=0)] | None = None
    book: str | None = None
    dataset: str | None = None

    @property
    def baseline(self) -> bool:
        """Whether the run is a non-private baseline, without noise."""
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
        if self.book is not None and _has_password(self.book):
            raise ValueError(
                "book: a recipe is public, so the book's URL must have no password here: set"
                " DPRLHF_BOOK or PGPASSWORD, or use ~/.pgpass"
            )
        return self


def _has_password(url: str) -> bool:
    parts = urllib.parse.urlsplit(url) if "://" in url else None
    return parts is not None and (parts.password is not None or "password" in parts.query)


class Auto(Settings):
    """What the planner may spend, and what it chooses, when the run starts (``privacy.auto``).

    It takes the plan with the largest predicted rise of the reward, from the number of users, the
    guarantee, and what public prompts show; no user's prompt is read for it
    (:mod:`dprlhf.training.planner`). ``recipe.yaml`` in the run folder has the numbers chosen.

    Attributes:
        minutes: Longest duration of the run, as estimated from the time of public responses.
        max_responses: Most responses to users' prompts in the whole run. Without either limit, the
            number that the recipe's own settings take.
        rounds: Numbers of rounds to choose from; none for a default list. The learning rate is
            scaled so that its product with the rounds stays that of the recipe.
        responses: Numbers of responses to a prompt to choose from; none keeps
            ``rollout.responses``.
        partitions: Partitions to choose from.
    """

    minutes: PositiveFloat | None = None
    max_responses: PositiveInt | None = None
    rounds: list[PositiveInt] = []
    responses: list[Annotated[int, Field(ge=2)]] = []
    partitions: Annotated[list[Partition], Field(min_length=1)] = ["random-allocation", "fixed"]


class Privacy(Budget):
    """The privacy guarantee of a run of private updates.

    Attributes:
        reward_share: Share of the clip norm that a scaled copy of the user's mean reward takes in
            the released vector, so that the metrics show a noised mean reward of each round; 0
            turns it off.
        auto: Let the planner choose rounds, participations, bands and partition when the run
            starts; ``true`` takes the default limits. Null keeps what the recipe says.
    """

    reward_share: Annotated[float, Field(ge=0, lt=1)] = 0.14
    auto: Auto | None = None

    @field_validator("auto", mode="before")
    @classmethod
    def _yes_or_no(cls, given: Any) -> Any:
        return {} if given is True else None if given is False else given

    @model_validator(mode="after")
    def _promised(self) -> Privacy:
        if self.auto is not None and (self.epsilon is None or self.baseline):
            raise ValueError("auto needs a finite epsilon, which you state: noise follows from it")
        return self


class Evaluation(Settings):
    """Evaluation on public rows, which costs no privacy.

    Attributes:
        data: The public rows.
        prompts: Number of rows that are used, from the start; at least 2, for a standard error.
        every: Number of rounds between evaluations during the run; null evaluates before and after
            the run only.
        declared_public: Declare that these rows were public before, and were chosen without a look
            at the users. A row that a user has as well is then no reason to refuse the run.
    """

    data: Data
    prompts: Annotated[int, Field(ge=2)] = 256
    every: PositiveInt | None = None
    declared_public: bool = False


class Tracking(Settings):
    """Experiment trackers, which get the lines of ``metrics.jsonl`` (:mod:`dprlhf.runs.trackers`).

    Attributes:
        report_to: Trackers to report to; each is a package to install separately.
        project: Project under which the trackers file the run.
        live: Send each round's metrics when it ends, not all of them at the end of the run. The
            service then sees how long each round took, and from that about how many users it had.
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
        run: Its run folder; or a model that it left, in a folder or on the hub, which carries its
            record.
        users: ``shared`` if a user may be in both runs, so that the costs compose; ``disjoint`` if
            nobody is, so that the larger cost counts. ``disjoint`` is refused where the ``secret/``
            folders of the two runs refute it. That they do not refute it proves nothing: the
            declaration is yours.
    """

    run: str
    users: Literal["shared", "disjoint"] = "shared"


def check_promise(
    privacy: Budget,
    *,
    clip_norm: float,
    data: Data,
    public: Data | None,
    fitted: bool,
    guides: Data | None = None,
) -> None:
    """Refuse what would make the stated ε wrong, or publish what is private.

    Args:
        privacy: The promised guarantee.
        clip_norm: Clip norm S.
        data: The section of the users' rows.
        public: The section of the evaluation's rows; None without evaluation.
        fitted: Whether a model or reward was fitted on the same users without a stated cost.
        guides: The section of the public rows of ``update.subspace``; None without them.

    Raises:
        ValueError: Names the setting and what would work.
    """
    if math.isinf(clip_norm) and not privacy.baseline:
        raise ValueError("update.clip_norm must be finite unless privacy.epsilon is .inf")
    if public is not None and _same_rows(data, public):
        raise ValueError(
            "evaluation.data names the private users: evaluation writes prompts and scores in the"
            " open, so it needs public rows"
        )
    if guides is not None and _same_rows(data, guides):
        raise ValueError(
            "update.subspace.data names the private users: the directions that are fitted to it are"
            " used without noise, so it needs public rows"
        )
    if fitted and not privacy.baseline:
        raise ValueError(
            "trained_on_private_users: the model or a reward was fitted on the same users without"
            " a stated privacy cost, so no epsilon can be stated; use a checkpoint that never saw"
            " them, or privacy.epsilon=.inf for a non-private baseline"
        )


def _same_rows(a: Data, b: Data) -> bool:
    """Return whether two sections may name the same rows, ``skip`` and ``limit`` left aside."""
    if IN_MEMORY in (a.path, b.path) or _place(a.path) != _place(b.path):
        return False
    place = Path(_place(a.path))
    # A file, and a folder with one saved dataset, are read whatever name and split are asked for.
    if place.is_file() or (place / "dataset_info.json").is_file():
        return True
    return a.name == b.name and _splits_meet(a.split, b.split)


def _place(path: str) -> str:
    return os.path.realpath(path) if os.path.exists(path) else path


def _splits_meet(a: str, b: str) -> bool:
    """Return whether ``train`` and ``train[:90%]+test`` and the like have a split in common.

    Two different slices of one split are taken to have no row in common.
    """
    for one in a.split("+"):
        for other in b.split("+"):
            same = one.partition("[")[0] == other.partition("[")[0]
            if same and (one == other or "[" not in one or "[" not in other):
                return True
    return False
