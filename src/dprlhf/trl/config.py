"""TRL's configs with a privacy budget: ``PrivateGRPOConfig`` and ``PrivateRLOOConfig``."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import NoneType
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

import trl

from dprlhf.errors import DprlhfError
from dprlhf.recipe import KL, PG, Data, Optimizer, Privacy, Recipe, Rollout
from dprlhf.recipe.base import default_of
from dprlhf.recipe.sections import BETAS
from dprlhf.recipe.trl_names import update_settings
from dprlhf.trl.fields import GRPO, RLOO, Field

C = TypeVar("C", bound="PrivacyFields")

AUTO = "auto"
"""The value of ``privacy_subspace`` that leaves it to the public rows."""

MAPPINGS = ("privacy_subspace",)
"""Settings of here that are mappings, which transformers reads as JSON from a command line."""


def setting(default: Any, text: str) -> Any:
    """Return a setting with its default, and with the text that a command line's help has."""
    return field(default=default, metadata={"help": text})


@dataclass
class PrivacyFields:
    """What a private trainer needs beside TRL's settings.

    TRL's ``epsilon`` and ``delta`` are clip ranges, so the guarantee's settings begin with
    ``privacy_``. They are the keys of the section ``privacy`` of a recipe, unless noted.

    Attributes:
        privacy_epsilon: Largest ε that the run may spend; ``math.inf`` is a baseline without noise.
        privacy_noise_multiplier: Noise multiplier z, in place of ``privacy_epsilon``.
        privacy_delta: δ; keep it well below 1 / (number of users).
        privacy_unit: Column that names the user, or columns of a row's several owners; None makes
            every row a user of its own.
        privacy_max_prompts_per_user: Number of prompts that a user keeps.
        privacy_max_prompt_tokens: Longer prompts keep their last tokens. None takes the length of
            the rows of ``eval_dataset``, or 512 without them and what the tools take, and never
            more than ``max_completion_length`` leaves of the model's context.
        privacy_adjacency: How neighbouring datasets differ: ``zero-out`` or ``replace-one``.
        privacy_partition: How users are assigned to rounds.
        privacy_participations: Number of rounds that a user takes part in; None takes
            ``num_train_epochs``.
        privacy_clip_norm: Clip norm S, the L2 bound on one user's gradient.
        privacy_reward_range: Bound R: the weighted sum of the rewards is clipped to [−R, R]. The
            noise on the released mean reward is in proportion to it.
        privacy_lora_fa: Train B of a LoRA alone, with A frozen at its random start (FFA-LoRA, the
            adapter that LoRA-FA trains, too), which halves what the noise is spread over.
        privacy_declared_public: Declares that the prompts of the trainer's ``eval_dataset`` were
            public before, even where a user has the same text.
        privacy_subspace: Settings of ``update.subspace``: directions from public prompts, along
            which gradients are released; ``auto`` takes those rows of ``eval_dataset`` that the run
            does not evaluate, if there are enough and no step rule is given; None has no subspace.
        privacy_previous: Folders of earlier runs on the same users, whose cost counts.
        privacy_book: Budget book that counts what the users spend over all runs.
    """

    privacy_epsilon: float | None = setting(None, "The budget ε.")
    privacy_noise_multiplier: float | None = setting(
        None, "The noise multiplier z, in place of privacy_epsilon."
    )
    privacy_delta: float = setting(1e-5, "δ of the guarantee.")
    privacy_unit: list[str] | str | None = field(
        default=None, metadata={"help": "Column that names the user; rows are users without it."}
    )
    privacy_max_prompts_per_user: int = setting(
        default_of(Data, "max_prompts_per_user"), "Number of prompts that a user keeps."
    )
    privacy_max_prompt_tokens: int | None = setting(
        None, "Longest prompt; longer ones keep their last tokens."
    )
    privacy_adjacency: str | None = setting(None, "How neighbouring datasets differ.")
    privacy_partition: str = setting("random-allocation", "How users are assigned to rounds.")
    privacy_participations: int | None = setting(
        None, "Rounds of a user; None takes num_train_epochs."
    )
    privacy_clip_norm: float = setting(1.0, "Bound on the norm of one user's gradient.")
    privacy_reward_range: float = setting(
        default_of(Recipe, "reward_range"), "The rewards' sum is clipped to ± this number."
    )
    privacy_lora_fa: bool = setting(False, "Train B of a LoRA alone, with A frozen.")
    privacy_declared_public: bool = setting(False, "The evaluation prompts were public before.")
    privacy_subspace: dict[str, Any] | str | None = field(
        default=AUTO, metadata={"help": "Settings of update.subspace, on a command line as JSON."}
    )
    privacy_previous: list[str] = field(
        default_factory=list, metadata={"help": "Earlier runs on the same users."}
    )
    privacy_book: str | None = setting(None, "Budget book.")

    # TRL's settings whose defaults are the recipe's here.
    learning_rate: float | None = setting(None, "Step size; None takes the recipe's default.")
    adam_beta1: float = setting(BETAS[0], "β₁.")
    adam_beta2: float = setting(BETAS[1], "β₂.")
    lr_scheduler_type: str = setting(
        default_of(Optimizer, "schedule"), "constant, linear or cosine."
    )
    num_generations: int = setting(default_of(Rollout, "responses"), "Responses to a prompt.")
    max_completion_length: int = setting(
        default_of(Rollout, "max_new_tokens"), "Tokens of a response."
    )
    per_device_train_batch_size: int = setting(
        default_of(PG, "batch_size"), "Responses in a micro-batch."
    )
    beta: float = setting(default_of(KL, "beta"), "The KL penalty.")
    seed: int = setting(default_of(Recipe, "seed"), "Of public draws.")
    num_train_epochs: float = setting(
        float(default_of(Privacy, "participations")), "Participations of a user."
    )
    gradient_checkpointing: bool = setting(False, "Compute activations again to save memory.")

    trl_fields: ClassVar[dict[str, Field]]
    trl_config: ClassVar[type[Any]]

    def __post_init__(self) -> None:
        """Refuse what cannot be private, and settings without a budget.

        Raises:
            DprlhfError: Names the setting, the reason, and the nearest private setting.
        """
        self.refuse()
        online: Any = self
        if hasattr(self, "generation_batch_size"):
            # TRL wants multiples of num_generations, also where the number has no effect here.
            online.generation_batch_size, online.steps_per_generation = None, self.num_generations
            online.per_device_eval_batch_size = online.num_generations_eval or self.num_generations
        if getattr(self, "bf16", None) is None:  # TRL's True needs hardware; nothing here does
            self.bf16 = False
        with warnings.catch_warnings():
            # TRL's defaults have names that transformers is about to change.
            warnings.simplefilter("ignore", FutureWarning)
            super().__post_init__()  # type: ignore[misc]

    def refuse(self) -> None:
        """Refuse what TRL offers and a private run cannot do, and settings without a budget.

        A trainer calls it again, since scripts may change a config's attributes.

        Raises:
            DprlhfError: Names the setting, the reason, and the nearest private setting.
        """
        for name, default in defaults(type(self)).items():
            value = getattr(self, name)
            # A command line turns "no" into False; 0 and {} ask for as little as None.
            untouched = value == default or (not value and default in (None, "no"))
            if self.trl_fields[name].kind == "refused" and not untouched:
                raise DprlhfError(f"{name}={value!r}: {self.trl_fields[name].note}")
        _check_types(self)
        if (self.privacy_epsilon is None) == (self.privacy_noise_multiplier is None):
            raise DprlhfError(
                "give exactly one of privacy_epsilon (math.inf for a run without privacy) and"
                " privacy_noise_multiplier (TRL's epsilon and delta are clip ranges, no budget)"
            )
        if self.privacy_epsilon is not None and not self.privacy_epsilon > 0:
            raise DprlhfError(f"privacy_epsilon must be above 0, not {self.privacy_epsilon}")

    @property
    def is_baseline(self) -> bool:
        """Whether the run adds no noise and promises nothing."""
        return self.privacy_epsilon == math.inf or self.privacy_noise_multiplier == 0

    @classmethod
    def from_trl(cls, config: Any, **privacy: Any) -> Self:
        """Return a config with TRL's settings and a budget.

        Settings that ``config`` leaves at TRL's default get this class's default, and a line on
        stderr names those that differ.

        Args:
            config: TRL's config of the same algorithm.
            **privacy: ``privacy_epsilon`` and the other settings of :class:`PrivacyFields`, or
                changes of TRL's.

        Raises:
            DprlhfError: A setting is refused.
        """
        if not isinstance(config, cls.trl_config):
            raise DprlhfError(f"from_trl takes a {cls.trl_config.__name__}, not {config!r}")
        # TRL fills in some settings from others and from the machine: only what differs from a
        # config of the same machine was set.
        device = {"use_cpu": config.use_cpu, "bf16": config.bf16}
        untouched = cls.trl_config(output_dir=config.output_dir, **device)
        changed = {
            f.name: getattr(config, f.name)
            for f in dataclasses.fields(cls.trl_config)
            if f.init and getattr(config, f.name) != getattr(untouched, f.name)
        }
        given = {"output_dir": config.output_dir, **device, **changed, **privacy}
        made = cls(**given)
        made.say_differences(set(given))
        return made

    def say_differences(self, known: Collection[str] = ()) -> None:
        """Print which defaults differ from TRL's, once per process and kind of config.

        Args:
            known: Names of settings that were set, which are left out.
        """
        trl_defaults, own = defaults(self.trl_config), defaults(type(self))
        others = [
            f"{name}={own[name]!r} (TRL: {value!r})"
            for name, value in trl_defaults.items()
            if value != own[name] and getattr(self, name) == own[name] and name not in known
        ]
        if others and type(self) not in _SAID:
            _SAID.add(type(self))
            print(f"dprlhf: defaults that differ from TRL's: {', '.join(others)}", file=sys.stderr)


def _check_types(config: PrivacyFields) -> None:
    """Refuse a privacy setting of the wrong type, such as the text ``"4"`` for a number."""
    for name, hint in get_type_hints(PrivacyFields).items():
        if get_origin(hint) is ClassVar:
            continue
        kinds = [get_origin(kind) or kind for kind in get_args(hint) or (hint,)]
        if get_origin(hint) in (list, dict):
            kinds = [get_origin(hint)]
        value = getattr(config, name)
        if dict in kinds and str in kinds:
            # A command line's JSON, which transformers reads after this; other texts are none.
            if isinstance(value, str) and (value.startswith("{") or value == AUTO):
                continue
            kinds.remove(str)
        fits = (isinstance(value, _KINDS[kind][1]) for kind in kinds)  # True is an int for Python
        if not any(fits) or (isinstance(value, bool) and bool not in kinds):
            taken = " or ".join(_KINDS[kind][0] for kind in kinds)
            raise DprlhfError(f"{name} takes {taken}, not {value!r}")


_KINDS: dict[type, tuple[str, type]] = {
    float: ("a number", Real),
    int: ("a whole number", Integral),
    str: ("a text", str),
    bool: ("True or False", bool),
    list: ("a list", list),
    dict: ("a mapping", dict),
    NoneType: ("None", NoneType),
}
"""What a type is called in messages, and what is taken for it."""


_SAID: set[type] = set()


def defaults(config: type[Any]) -> dict[str, Any]:
    """Return the default of each setting that TRL's config has, as ``config`` declares it."""
    base = config.trl_config if issubclass(config, PrivacyFields) else config
    names = {f.name for f in dataclasses.fields(base)}
    return {
        f.name: f.default_factory() if callable(f.default_factory) else f.default
        for f in dataclasses.fields(config)
        if f.name in names
    }


@dataclass
class PrivateGRPOConfig(PrivacyFields, trl.GRPOConfig):  # type: ignore[misc]
    """TRL's ``GRPOConfig`` with a privacy budget.

    TRL's default loss divides by the tokens of the batch, so that of ``loss_type`` differs. The
    other defaults are the recipe's (:class:`PrivacyFields`).
    """

    loss_type: str = setting("grpo", "grpo or dr_grpo.")

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*trl.GRPOConfig._VALID_DICT_FIELDS, *MAPPINGS]
    trl_fields: ClassVar[dict[str, Field]] = GRPO
    trl_config: ClassVar[type[Any]] = trl.GRPOConfig

    def refuse(self) -> None:
        """Also refuse reward scales that couple users, and a ``delta`` that is no clip of a ratio.

        Raises:
            DprlhfError: Names the setting and what would work.
        """
        update_settings(self.loss_type, self.scale_rewards)
        if self.delta is not None and not self.delta > 1:
            raise DprlhfError(f"delta={self.delta}: {GRPO['delta'].note}")
        super().refuse()


@dataclass
class PrivateRLOOConfig(PrivacyFields, trl.RLOOConfig):  # type: ignore[misc]
    """TRL's ``RLOOConfig`` with a privacy budget, and the recipe's defaults."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*trl.RLOOConfig._VALID_DICT_FIELDS, *MAPPINGS]
    trl_fields: ClassVar[dict[str, Field]] = RLOO
    trl_config: ClassVar[type[Any]] = trl.RLOOConfig


def as_private(config: Any, kind: type[C], default_folder: str) -> C:
    """Return the trainer's config, or say what is missing.

    Raises:
        DprlhfError: There is none, or it is TRL's own, which has no budget.
        DprlhfError: A setting that was changed since is refused.
    """
    if isinstance(config, kind):
        config.refuse()
        return config
    if isinstance(config, kind.trl_config):
        raise DprlhfError(
            f"args is TRL's {type(config).__name__}, which has no privacy budget: give"
            f" {kind.__name__}.from_trl(args, privacy_epsilon=…)"
        )
    given = "" if config is None else f" is a {type(config).__name__}"
    raise DprlhfError(
        f"args{given}: give {kind.__name__}(output_dir={default_folder!r}, privacy_epsilon=…)"
    )
