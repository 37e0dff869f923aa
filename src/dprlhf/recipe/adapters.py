"""The kinds of adapters by name, as far as a recipe has to know them without loading torch.

:mod:`dprlhf.policies.adapters` has the PEFT configuration of each. To add an adapter, add an entry
here and one there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AdapterType = Literal["lora", "ffa-lora", "lora-xs", "vera", "ia3", "norms", "biases", "full"]

_PLACES = frozenset({"target_modules", "layers"})


@dataclass(frozen=True)
class AdapterKind:
    """The facts about one kind of adapter.

    Attributes:
        description: What a model card says that ``policy/`` holds; ``{rank}`` is filled in.
        takes: Which of ``rank``, ``alpha``, ``use_rslora``, ``use_dora``, ``init``,
            ``target_modules`` and ``layers`` have an effect.
        experimental: Whether no published experiment measures it yet.
        needs_weights: Whether building or differentiating it reads the weights of the layers that
            it adapts, which a quantised layer does not hold as numbers.
    """

    description: str
    takes: frozenset[str] = _PLACES
    experimental: bool = False
    needs_weights: bool = False


_SCALED = _PLACES | {"rank", "alpha", "use_rslora"}
_PLAIN = _SCALED | {"use_dora", "init"}

ADAPTERS: dict[AdapterType, AdapterKind] = {
    "lora": AdapterKind("A LoRA adapter (rank {rank})", _PLAIN),
    "ffa-lora": AdapterKind(
        "A LoRA adapter (rank {rank}, A frozen at its start, B trained)",
        _PLAIN,
    ),
    "lora-xs": AdapterKind(
        "A LoRA-XS adapter (trained {rank} x {rank} matrices, stored as LoRA)",
        _SCALED,
        experimental=True,
        needs_weights=True,
    ),
    "vera": AdapterKind(
        "A VeRA adapter (rank {rank}, two trained vectors for each layer)",
        _PLACES | {"rank"},
        experimental=True,
        needs_weights=True,
    ),
    "ia3": AdapterKind("An IA3 adapter (trained scales)", experimental=True, needs_weights=True),
    "norms": AdapterKind("Trained norm layers (PEFT's LN tuning)", experimental=True),
    "biases": AdapterKind("Trained biases (stored as LoRA whose B is zero)", experimental=True),
    "full": AdapterKind("All weights (full fine-tuning)", frozenset(), experimental=True),
}

FORMER_NAMES = {"lora-b": "ffa-lora"}
"""Names that recipes of earlier versions use, with today's name."""
