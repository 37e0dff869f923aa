"""The sections of rewards, sampling, the KL penalty, the optimizer, evaluation and tracking."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dprlhf.hub import split_revision
from dprlhf.recipe.base import Experimental, PositiveFloat, PositiveInt, Settings
from dprlhf.recipe.data import PublicData
from dprlhf.recipe.policy import Source

BETAS = (0.9, 0.9)
"""Decay rates (β₁, β₂) of Adam's moments; a slower β₂, as torch's, learns little in few rounds."""


class Reward(Settings):
    """One reward; give either ``function`` or ``classifier``.

    Attributes:
        function: ``package.module:function`` or ``file.py:function``, with TRL's signature.
        classifier: Hub id or folder of a sequence classifier, or ``asset:…``. A hub id may end in
            ``@`` and a branch, tag or commit.
        weight: Weight of this reward in the sum.
        times_column: Column of the dataset with a factor for each score, such as 1 for a user who
            wants more of it and −1 for one who wants less; null for none. A row without a number
            in it gets no score.
        label: Label whose log-odds are the classifier's score; not for a classifier with one
            output.
        text: What the classifier reads: the prompt with the completion, or the completion alone.
    """

    function: str | None = None
    classifier: str | None = None
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    times_column: str | None = None
    label: str | None = None
    text: Literal["prompt+completion", "completion"] = "prompt+completion"

    @property
    def name(self) -> str:
        """What the recipe calls the reward."""
        return str(self.function or self.classifier)

    def source(self, key: str) -> Source:
        """Return where the reward comes from; ``key`` is this section's name."""
        path, revision = split_revision(self.classifier or "")
        named = f"{key}.classifier" if self.classifier else None
        return Source(named, f"reward {self.name}", path, revision)

    @model_validator(mode="after")
    def _one_source(self) -> Reward:
        if (self.function is None) == (self.classifier is None):
            raise ValueError("give either function or classifier")
        return self


class Agent(Settings):
    """Tools and an environment, as TRL's ``GRPOTrainer`` takes them; give at least one key.

    Attributes:
        tools: Functions that the policy may call, each ``package.module:function`` or
            ``file.py:function``, with type hints and a docstring in Google's style: the chat
            template shows them to the model.
        environment: Class, or a function without arguments, that makes one environment for each
            trajectory: ``package.module:Class`` or ``file.py:Class``. Its ``reset`` gets the
            prompt's row, and its other public methods are tools. A mapping gives several by name,
            of which each row's column ``environment`` chooses one.
        max_tool_calling_iterations: Largest number of turns with tool calls; null ends a trajectory
            only at a turn without a call, or after ``rollout.max_new_tokens``.
    """

    tools: list[str] = []
    environment: str | dict[str, str] | None = None
    max_tool_calling_iterations: PositiveInt | None = None

    @model_validator(mode="after")
    def _some(self) -> Agent:
        if not self.tools and self.environment is None:
            raise ValueError("give tools, an environment or both")
        return self


class Rollout(Settings):
    """How responses are sampled.

    Attributes:
        base_policy: Sampling policy μ of He & Zhou 2025, Algorithm 1: ``on-policy`` samples all
            responses from the current policy π_t; ``reference`` samples half of them from the base
            model (the adapter switched off).
        responses: Number of responses to each prompt (TRL's ``num_generations``), at least 2, since
            the baseline of each is the user's other responses; with ``reference``, half from each
            policy.
        max_new_tokens: Largest number of tokens in a response.
        temperature: Sampling temperature of both policies. Log-probabilities are taken at the same
            temperature.
        top_k: Sample from this many most likely tokens; 0 for all. This and the next two keys mean
            what they mean in transformers' ``generate``, and log-probabilities are those of the
            truncated, renormalised distribution.
        top_p: Sample from the most likely tokens whose probabilities add up to this; 1 for all.
        min_p: Sample from tokens whose probability is at least this share of the largest one; 0
            for all.
        stop: Strings that end a response and stay in its text.
        mask_truncated: Give weight 0 to a response that did not end within ``max_new_tokens``
            (TRL's ``mask_truncated_completions``). Its reward still counts in the advantages of the
            user's other responses.
        batch_size: Number of responses that are sampled at once. Incomplete batches are padded with
            dummy prompts, so that their shape does not depend on the users. Larger is faster until
            the dummies outnumber the responses. ``auto`` determines it once for a run: a round's
            expected responses, but at most 128 on a CPU and what fits into a GPU's memory.
        backend: ``transformers``, or experimental ``vllm`` (extra ``vllm``, a GPU, one process,
            ``VLLM_BATCH_INVARIANT=1``), which ignores ``batch_size``.
        agent: Tools or an environment, for responses of several turns; null for one turn.
    """

    base_policy: Literal["on-policy", "reference"] = "on-policy"
    responses: int = 4
    max_new_tokens: PositiveInt = 32
    temperature: PositiveFloat = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: list[Annotated[str, Field(min_length=1)]] = []
    mask_truncated: bool = False
    batch_size: PositiveInt | Literal["auto"] = 128
    backend: Annotated[Literal["transformers", "vllm"], Experimental(("vllm",))] = "transformers"
    agent: Annotated[Agent | None, Experimental()] = None

    @property
    def shares_prompts(self) -> bool:
        """Whether all responses to a prompt answer the same tokens."""
        return self.agent is None or self.agent.environment is None

    @property
    def truncates(self) -> list[str]:
        """The keys that give some tokens probability zero because others are more likely."""
        off = {"top_k": 0, "top_p": 1, "min_p": 0}
        return [f"rollout.{name}" for name, value in off.items() if getattr(self, name) != value]

    @field_validator("responses")
    @classmethod
    def _compared_with_others(cls, responses: int) -> int:
        if responses < 2:
            raise ValueError(
                "at least 2 responses to a prompt, since each is compared with the user's others"
            )
        return responses

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop or []

    @field_validator("top_k", "min_p", mode="before")
    @classmethod
    def _none_is_off(cls, value: Any) -> Any:
        return 0 if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> Rollout:
        if self.base_policy == "reference" and self.responses % 2:
            raise ValueError("responses must be even when base_policy is reference")
        if self.base_policy == "reference" and self.truncates:
            raise ValueError(
                f"{self.truncates[0]} works with base_policy on-policy: the base model keeps other"
                " tokens than the policy, which makes a response's probability under the policy"
                " zero"
            )

        if self.agent is not None and self.backend == "vllm":
            raise ValueError("agent: turns are sampled by backend transformers, not by vllm")
        return self


class KL(Settings):
    """The KL penalty: subtracts β (log π_t(y|x) − log π_ref(y|x)) from each response's reward.

    The reference policy π_ref is the policy with its adapter switched off. A run reports rewards
    without the penalty.

    Attributes:
        beta: Coefficient β, in units of the reward per nat; 0 for no penalty.
    """

    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class Optimizer(Settings):
    """The server-side optimizer, which steps along the released gradient (post-processing).

    Attributes:
        name: ``sgd``; ``normalized-sgd``: SGD whose step has a fixed length along the momentum
            (arXiv 2002.03305), at most that with ``target_kl``; or ``adam``.
        learning_rate: Step size; with a schedule, its largest value. For ``normalized-sgd`` the L2
            length of a step, over all trained parameters together.
        momentum: Momentum μ of ``sgd`` and ``normalized-sgd``.
        schedule: Decay of the learning rate over the rounds: none, or linear or cosine to nearly 0.
    """

    name: Literal["sgd", "normalized-sgd", "adam"] = "adam"
    learning_rate: PositiveFloat = 0.02
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class Tracking(Settings):
    """Experiment trackers, which get the lines of ``metrics.jsonl`` (:mod:`dprlhf.runs.trackers`).

    Attributes:
        report_to: Trackers to report to; each is a package to install separately. They file the
            run under the project ``dprlhf``.
    """

    report_to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_several(cls, names: Any) -> Any:
        return [] if names == "none" else [names] if isinstance(names, str) else names


_LABELS = {
    "response_tokens": "tokens in a response",
    "ended_share": "share of responses that ended",
    "distinct_1": "different words per word",
    "distinct_2": "different pairs of words per word",
    "kl": "KL divergence from the base model, nats in a response",
    "kl_per_token": "KL divergence from the base model, nats in a token",
}


def measure_label(name: str) -> str:
    """Return a measure's name in words, for reports.

    >>> measure_label("distinct_1"), measure_label("rewards/margins")
    ('different words per word', 'rewards/margins')
    """
    return _LABELS.get(name, name.replace("_", " "))


class Evaluation(Settings):
    """Evaluation on public rows, of a stage's loss or of a policy's responses; it costs no privacy.

    Attributes:
        data: The public rows.
        prompts: Number of rows used, from the start; at least 2, for a standard error.
        every: Number of rounds between evaluations during the run; null evaluates before and after
            the run only.
        declared_public: Declares that these rows were public before and were chosen independently
            of the users. The run is then not refused if a user has one of them as well.
    """

    data: PublicData
    prompts: Annotated[int, Field(ge=2)] = 256
    every: PositiveInt | None = None
    declared_public: bool = False
