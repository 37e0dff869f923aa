"""The sections of a recipe that are not the update's."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dprlhf.privacy.accounting import Adjacency, Partition
from dprlhf.recipe.base import IN_MEMORY, PositiveFloat, PositiveInt, Settings

Beta = Annotated[float, Field(ge=0, lt=1)]


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
        revision: a branch, tag or commit of a hub id, best the commit: then a later run loads the
            same. None takes what the hub has now.
        dtype: of the frozen base; the adapter stays in float32. ``auto`` is bfloat16 where the
            machine computes in it, else float32; a run keeps what it started with.
        attn_implementation: transformers' attention; None takes its default. ``eager`` may be the
            faster one for short texts on a CPU; its memory grows with the square of their length.
            Flash attention's own kernels are not offered: they pack the rows of a micro-batch into
            one, where a user's rounding would depend on who else is there.
        trained_on_private_users: declare whether the base checkpoint was fitted on the same users
            without a stated cost. If it was, no ε can be stated for them, and only a non-private
            baseline will run.
        trust_remote_code: let the checkpoint bring code of its own, as transformers does.
        adapter: what of the model is trained.
    """

    model_name_or_path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    attn_implementation: Literal["sdpa", "eager"] | None = None
    trained_on_private_users: bool = False
    trust_remote_code: bool = False
    adapter: Adapter = Adapter()


class Data(Settings):
    """A prompt dataset: a hub id, a folder, a ``.csv``/``.jsonl``/``.parquet`` file, ``asset:…``.

    Attributes:
        path: where the rows are.
        name: the dataset's configuration name on the hub.
        revision: a branch, tag or commit of it on the hub; None takes what the hub has now.
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
        revision: a branch, tag or commit of a classifier's hub id; None takes what the hub has now.
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
    revision: str | None = None
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
        if self.revision is not None and self.classifier is None:
            raise ValueError("revision is for a classifier, not for a function or plugin")
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
        backend: ``transformers``, or ``vllm`` (``pip install -e '.[vllm]'`` in the clone, a GPU,
            one process, ``VLLM_BATCH_INVARIANT=1``); with ``vllm``, ``batch_size`` has no effect.
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
            rounds (see :mod:`dprlhf.privacy.correlated_noise`).
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
    """Evaluation on public rows, which costs no privacy.

    Attributes:
        data: the public rows.
        prompts: how many of them, from the start; at least 2, for a standard error.
        every: evaluate after every so many rounds; None evaluates before and after only.
    """

    data: Data
    prompts: Annotated[int, Field(ge=2)] = 256
    every: PositiveInt | None = None


class Tracking(Settings):
    """Experiment trackers, which get the lines of ``metrics.jsonl`` (:mod:`dprlhf.runs.trackers`).

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


def check_promise(
    privacy: Budget,
    *,
    clip_norm: float,
    optimizer: Optimizer,
    data: Data,
    public: Data | None,
    fitted: bool,
) -> None:
    """Refuse what would make the stated ε wrong, or publish what is private.

    Args:
        privacy: what is promised.
        clip_norm: S.
        optimizer: of the released gradient.
        data: the users' rows.
        public: the rows of the evaluation.
        fitted: whether a model that takes part was fitted on the same users at no stated cost.
    """
    if math.isinf(clip_norm) and not privacy.baseline:
        raise ValueError("update.clip_norm must be finite unless privacy.epsilon is .inf")
    if privacy.bands > 1 and optimizer.name == "adam-corrected":
        raise ValueError(
            "optimizer.name: adam-corrected takes every round's noise to be the same, which"
            " privacy.bands above 1 changes: write sgd or adam"
        )
    if public is not None and _same_rows(data, public):
        raise ValueError(
            "evaluation.data names the private users: evaluation writes prompts and scores in the"
            " open, so it needs public rows"
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

    Two different slices of a split may be apart, and are taken at their word.
    """
    for one in a.split("+"):
        for other in b.split("+"):
            same = one.partition("[")[0] == other.partition("[")[0]
            if same and (one == other or "[" not in one or "[" not in other):
                return True
    return False
