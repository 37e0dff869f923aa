"""Which of PEFT's tuners and settings train, and whether the engine of one user a pass is right.

Writes rows to ``docs/results/review.json``, in about fifteen minutes on a core::

    python -m scripts.review.peft_tuners
"""

from __future__ import annotations

import collections
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

import dprlhf
from dprlhf.errors import DprlhfError
from dprlhf.runs.measurements import Result, at_least, write_results
from gradients.test_engine_choice import (
    LAYERS,
    NOT_IN_OPACUS,
    OF_OPACUS,
    alone,
    net_of,
    opacus_gradients,
)
from helpers import tiny

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "review.json"

QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}

TYPES: dict[str, list[dict[str, Any]]] = {
    "ADALORA": [{"total_step": 9, "init_r": 4, "target_r": 4, **QV}],
    "ADAPTION_PROMPT": [{"adapter_len": 2, "adapter_layers": 1}],
    "BOFT": [{"boft_block_size": 4, **QV}, {"boft_block_size": 4, "bias": "boft_only", **QV}],
    "C3A": [{"block_size": 16, **QV}, {"block_size": 8, "init_weights": "kaiming_uniform", **QV}],
    "CARTRIDGE": [{"num_virtual_tokens": 2}],
    "CPT": [{"cpt_token_ids": [1], "cpt_mask": [1], "cpt_tokens_type_mask": [1]}],
    "FOURIERFT": [{"n_frequency": 20, **QV}, {"n_frequency": 20, "init_weights": True, **QV}],
    "IA3": [
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        {"feedforward_modules": [], **QV},
    ],
    "LN_TUNING": [{}, {"target_modules": ["input_layernorm"]}],
    "LOHA": [QV, {"use_effective_conv2d": True, "rank_pattern": {"v_proj": 2}, **QV}],
    "LOKR": [QV, {"decompose_both": True, **QV}, {"decompose_factor": 4, **QV}],
    "MISS": [
        {"r": 8, **QV},
        {"r": 8, "init_weights": "bat", **QV},
        {"r": 8, "init_weights": "mini", "mini_r": 2, **QV},
    ],
    "MULTITASK_PROMPT_TUNING": [{"num_virtual_tokens": 2}],
    "OFT": [
        {"oft_block_size": 8, **QV},
        {"oft_block_size": 8, "coft": True, **QV},
        {"oft_block_size": 8, "block_share": True, **QV},
        {"oft_block_size": 8, "use_cayley_neumann": False, **QV},
    ],
    "POLY": [QV],
    "PREFIX_TUNING": [{"num_virtual_tokens": 2}],
    "PROMPT_TUNING": [{"num_virtual_tokens": 2}],
    "PSOFT": [{"r": 8, **QV}],
    "P_TUNING": [{"num_virtual_tokens": 2}],
    "RANDLORA": [QV, {"sparse": True, **QV}],
    "ROAD": [{"group_size": 8, "variant": f"road_{n}", **QV} for n in (1, 2, 4)],
    "SHIRA": [{"r": 2, **QV}],
    "TRAINABLE_TOKENS": [{"token_indices": [3, 5], "target_modules": ["embed_tokens"]}],
    "VBLORA": [{"vector_length": 16, "num_vectors": 16, **QV}],
    "VERA": [QV, {"save_projection": False, **QV}],
    "WAVEFT": [{"n_frequency": 20, **QV}],
    "XLORA": [{"hidden_size": 32, "adapters": {}}],
    "LORA": [
        *({"init_lora_weights": start, **QV} for start in (
            True, False, "gaussian", "orthogonal", "olora", "pissa", "pissa_niter_4", "mica",
            "eva", "corda", "lora_ga",
        )),
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}, **QV},
        {"use_rslora": True, **QV},
        {"use_dora": True, **QV},
        {"use_qalora": True, "qalora_group_size": 4, **QV},
        {"bias": "all", **QV},
        {"bias": "lora_only", **QV},
        {"lora_bias": True, **QV},
        {"modules_to_save": ["lm_head"], **QV},
        {"modules_to_save": ["embed_tokens", "lm_head"], **QV},
        {"modules_to_save": ["lm_head"], "ensure_weight_tying": True, **QV},
        {"rank_pattern": {"v_proj": 2}, **QV},
        {"alpha_pattern": {"v_proj": 2}, **QV},
        {"exclude_modules": ["down_proj"], "target_modules": "all-linear"},
        {"layers_to_transform": [1], **QV},
        {"layers_to_transform": [1], "layers_pattern": "layers", **QV},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": r".*self_attn\.q_proj"},
        {"target_modules": "all-linear"},
        {"target_parameters": ["mlp.gate_proj.weight"], **QV},
        {"trainable_token_indices": [2, 3], **QV},
        {"lora_dropout": 0.5, **QV},
        {"layer_replication": [[0, 2], [1, 2]], **QV},
        {"alora_invocation_tokens": [1], **QV},
    ],
}  # fmt: skip
"""Settings of PEFT's types; a type without an entry takes its defaults on query and value."""


def outcome(model: str, folder: Path, peft_type: str, fields: dict[str, Any]) -> str:
    """Return "trains", or the words of the refusal, of a run of two rounds."""
    try:
        dprlhf.train(
            model=model,
            prompts=[f"user {i} says" for i in range(24)],
            reward=lambda completions, **_: [float(len(c) % 5) for c in completions],
            epsilon=8.0,
            delta=1e-3,
            rounds=2,
            policy__adapter={"type": "peft", "peft": {"peft_type": peft_type, **fields}},
            rollout__max_new_tokens=3,
            output_dir=folder,
            quiet=True,
        )
    except DprlhfError as error:
        return str(error)
    except Exception as error:  # what a user would see as a traceback
        return f"NOT IN ONE LINE: {type(error).__name__}: {error}"
    return "trains"


def largest_error(layer: str, how: str) -> float:
    """Return the relative error of one user a pass against Opacus, of a layer in a network."""
    x = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, expected = alone(net_of(layer), x), opacus_gradients(layer, x, how)
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    """Train every setting once, compare layers with Opacus, and write the rows."""
    warnings.simplefilter("ignore")
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as base:
        model = str(tiny.save(Path(base) / "model", "llama"))
        for kind in sorted(str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING):
            for number, fields in enumerate(TYPES.get(kind, [QV])):
                said = outcome(model, Path(base) / f"{kind}-{number}", kind, fields)
                one_line = said if said == "trains" else "refused"
                found["unexplained" if said.startswith("NOT IN ONE") else one_line] += 1
                print(f"{kind} {fields}: {said[:200]}", flush=True)
    errors = [
        largest_error(layer, how)
        for layer in LAYERS
        for how in OF_OPACUS
        if f"{layer} {how}" not in NOT_IN_OPACUS
    ]
    tried = sum(found.values())
    write_results(
        OUT,
        [
            Result("peft: settings tried", tried, "settings", "all of PEFT's types", tried >= 80),
            at_least("peft: settings that train", found["trains"], f"of {tried}", 65),
            Result("peft: settings refused in one line", found["refused"], f"of {tried}",
                   "the others", found["unexplained"] == 0),
            at_least("peft: layers compared with Opacus", len(errors), "comparisons", 20),
            Result("peft: largest relative error to Opacus", max(errors), "", "below 1e-10",
                   max(errors) < 1e-10),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
