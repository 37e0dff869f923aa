"""The sections of models: what a run trains, its kinds of adapters, where a model comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import field_validator, model_validator

from dprlhf.recipe.base import Experimental, PositiveFloat, PositiveInt, Settings, changed

AdapterType = Literal["lora", "ffa-lora", "peft", "full"]


@dataclass(frozen=True)
class AdapterKind:
    """The facts about one kind of adapter."""

    description: str  # What a model card says that policy/ holds
    takes: frozenset[str] = frozenset()  # Which of the section's settings have an effect
    experimental: bool = False  # Whether no published experiment measures it yet


_LORA = frozenset({"target_modules", "layers", "rank", "alpha", "init"})

ADAPTERS: dict[AdapterType, AdapterKind] = {
    "lora": AdapterKind("A LoRA adapter (rank {rank})", _LORA),
    "ffa-lora": AdapterKind(
        "A LoRA adapter (rank {rank}, A frozen at its start, B trained)", _LORA
    ),
    "peft": AdapterKind("An adapter of PEFT ({peft_type})", frozenset({"peft"}), experimental=True),
    "full": AdapterKind("All weights (full fine-tuning)", experimental=True),
}

TOKENIZER_ARGUMENTS = frozenset(
    {
        "conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize",
        "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
        "return_assistant_tokens_mask",
    }
)  # fmt: skip
"""Arguments of ``apply_chat_template`` that are not the template's own."""

_UNMEASURED = Experimental(tuple(name for name, kind in ADAPTERS.items() if kind.experimental))


@dataclass(frozen=True)
class Source:
    """A model that a run starts from: what it trains, or a reward."""

    key: str | None  # The recipe's key that names it; None where the model is not a file or hub id
    label: str  # What the privacy card calls it
    path: str  # Hub id or folder; empty for a reward that is a function
    revision: str | None  # Branch, tag or commit of a hub id; None for its main branch


class Adapter(Settings):
    """The trainable part of the policy: a low-dimensional PEFT adapter.

    The norm of a release's noise grows with the square root of the number of trained parameters, so
    this section matters most for utility. :mod:`dprlhf.policies.adapters` has each type's paper.

    Attributes:
        type: ``lora`` trains both factors A and B of LoRA; ``ffa-lora`` freezes A and trains B
            alone. Experimental: ``peft`` trains the PEFT adapter in the key ``peft``; ``full``
            trains all weights, without an adapter, for small models.
        peft: For ``peft``: the fields of a PEFT configuration, such as ``{peft_type: VERA, r: 64,
            target_modules: [q_proj]}``. Dropout is off. Types with virtual tokens, or whose
            initialisation reads users' data, are refused.
        rank: Rank r of the LoRA types.
        alpha: LoRA's alpha: the adapter's output is scaled by alpha / rank. For the LoRA types.
        target_modules: Names of the adapted modules, as PEFT takes them, or ``all-linear``. Null
            takes PEFT's choice for the model's architecture.
        layers: Adapt only these decoder layers (from 0; −1 is the last): fewer dimensions, and the
            backward pass stops at the lowest of them. Null adapts all layers.
        init: Initial value of A: ``random`` as in PEFT; ``public-activations``, the principal
            directions of the layer's inputs on public prompts, along which the gradients of
            different users agree more; or ``public-contrast``, the directions that separate public
            prompts with different values of ``contrast_column``, for users whose preferences
            depend on it. For ``lora`` and ``ffa-lora``.
        contrast_column: Column of the public rows for ``public-contrast``; each of its values is a
            class, and there must be more classes than ``rank``. The rows are those of
            ``update.subspace``, or else those of ``evaluation.data`` that the evaluation does not
            use.
    """

    type: Annotated[AdapterType, _UNMEASURED] = "ffa-lora"
    rank: PositiveInt = 1
    alpha: PositiveFloat = 1.0
    target_modules: list[str] | str | None = None
    layers: list[int] | None = None
    init: Literal["random", "public-activations", "public-contrast"] = "random"
    contrast_column: str | None = None
    peft: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _settings_of_type(self) -> Adapter:
        for name in sorted(frozenset.union(*(kind.takes for kind in ADAPTERS.values()))):
            if changed(self, name) and name not in ADAPTERS[self.type].takes:
                types_ = ", ".join(t for t, kind in ADAPTERS.items() if name in kind.takes)
                raise ValueError(f"{name} is for type {types_}, not for {self.type}")
        if self.type == "peft" and "peft_type" not in (self.peft or {}):
            raise ValueError("type: peft needs peft: {peft_type: …} and the fields of that type")
        if (self.init == "public-contrast") != (self.contrast_column is not None):
            raise ValueError("init: public-contrast and contrast_column: give both, or neither")
        return self


Quantization = Literal["nf4", "nf4-double", "fp4", "fp4-double", "int8"]


class Policy(Settings):
    """The language model that is trained.

    Attributes:
        model_name_or_path: Hub id, folder, ``asset:…``, or the ``model/`` of an earlier stage.
        revision: Branch, tag or commit of a hub id. Give the commit, so that a later run loads the
            same weights; null takes the newest version.
        dtype: Data type of the frozen base model; the adapter stays in float32. ``auto`` is
            bfloat16 where the hardware is faster in it, else float32; a resumed run keeps it.
        attn_implementation: Attention implementation of transformers; null takes its default.
            ``eager`` can be faster for short texts on a CPU; its memory grows with the square of
            their length. FlashAttention is not offered: it packs the rows of a micro-batch into
            one, where the rounding of one user's values would depend on the other users.
        trust_remote_code: Run code from the checkpoint, as in transformers.
        chat_template_kwargs: Further arguments of the tokenizer's chat template, such as
            ``enable_thinking: false``.
        quantization: Quantise the frozen base model with bitsandbytes (extra ``quantization``):
            ``nf4`` or ``fp4`` in 4 bit, with ``-double`` to quantise their scales too (QLoRA,
            arXiv 2305.14314), or ``int8`` in 8 bit without LLM.int8()'s outlier columns, which
            couple the rows of a batch. Null keeps ``dtype``.
        gradient_checkpointing: Keep only the decoder layers' inputs for the backward pass and
            recompute the rest: less memory, more time, the same gradients.
        adapter: The trainable part of the model.
    """

    model_name_or_path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attn_implementation: Literal["sdpa", "eager"] | None = None
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    quantization: Quantization | None = None
    gradient_checkpointing: bool = False
    adapter: Adapter = Adapter()

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(TOKENIZER_ARGUMENTS & given.keys()):
            raise ValueError(f"{taken[0]} is set by the run, not by the template: leave it out")
        return given

    @model_validator(mode="after")
    def _frozen_base(self) -> Policy:
        if self.quantization is not None and self.adapter.type in ("full", "peft"):
            raise ValueError(
                f"quantization is for a frozen base model, and policy.adapter.type"
                f" {self.adapter.type} may train its weights or need them as numbers: take lora or"
                " ffa-lora"
            )
        return self

    def source(self, key: str) -> Source:
        """Return where the base model comes from; ``key`` is this section's name."""
        path = self.model_name_or_path
        return Source(
            f"{key}.model_name_or_path",
            f"base model {path}",
            path,
            self.revision,
        )
