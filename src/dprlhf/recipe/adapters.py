"""The kinds of adapters by name, as far as a recipe has to know them without loading torch.

:mod:`dprlhf.policies.adapters` makes the PEFT configuration of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

REMOVED_TYPES = {
    "lora-b": "take type: ffa-lora, its name in the literature",
    "lora-xs": "take type: ffa-lora, which trains few parameters, too",
    "vera": "take type: peft with peft: {peft_type: VERA, r: …}",
    "ia3": "take type: peft with peft: {peft_type: IA3}",
    "norms": "take type: peft with peft: {peft_type: LN_TUNING, target_modules: […]}",
    "biases": "take type: peft with peft: {peft_type: LORA, lora_bias: true, …}",
}
"""Types of earlier versions, with what takes their place."""
