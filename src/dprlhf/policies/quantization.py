"""A frozen base model in 4 or 8 bit, through transformers and bitsandbytes.

A quantised layer dequantises its weight and multiplies, so a row's output depends on that row
alone; LLM.int8()'s columns of outliers do not, and are switched off
(:mod:`dprlhf.policies.mixing`). The trained adapter stays in float32 beside it.
"""

from __future__ import annotations

from typing import Any

import torch

from dprlhf.errors import DprlhfError, extra


def quantization_config(name: str, dtype: torch.dtype) -> Any:
    """Return transformers' ``BitsAndBytesConfig`` of a recipe's ``policy.quantization``."""
    from transformers import BitsAndBytesConfig

    with extra("quantization", "policy.quantization"):
        import bitsandbytes  # noqa: F401 - transformers uses it
    if name == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    kind, _, double = name.partition("-")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=bool(double),
        bnb_4bit_compute_dtype=dtype,
    )


def quantization_of(config: Any) -> dict[str, str]:
    """Return the keys of a recipe's section ``policy`` that stand for a ``BitsAndBytesConfig``."""
    if config is None:
        return {}
    if getattr(config, "load_in_8bit", False):
        if config.llm_int8_threshold:
            raise DprlhfError(
                "quantization_config: LLM.int8() computes a column in 16 bit for all rows of a"
                " batch where one of them has an outlier, which would couple the users: give"
                " llm_int8_threshold=0.0, or load_in_4bit=True"
            )
        return {"quantization": "int8"}
    if not getattr(config, "load_in_4bit", False):
        raise DprlhfError(
            f"quantization_config: a {type(config).__name__} is not offered: give"
            " BitsAndBytesConfig(load_in_4bit=True), or load_in_8bit=True, llm_int8_threshold=0.0"
        )
    double = "-double" if config.bnb_4bit_use_double_quant else ""
    dtype = str(config.bnb_4bit_compute_dtype).removeprefix("torch.")
    return {"quantization": config.bnb_4bit_quant_type + double, "dtype": dtype}
