"""Write or compare the bits of short runs at a fixed key: a change of form changes none of them.

``PYTHONPATH=src:tests python -m helpers.golden FILE`` runs each update and each stage for three
rounds on a tiny model and writes hashes of its trained weights, ledger and metrics to FILE; where
FILE exists, it compares instead, and ends with status 1 where one differs. Bits depend on the
processor and on torch, so FILE is for one machine, from one state of the source to the next.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import DistilBertConfig, DistilBertModel

import dprlhf
import dprlhf.runs.opening
from helpers import fixed, runs, tiny

CHANGES = {
    "pg": {"update__clip_norm": 0.5, "privacy__partition": "stream"},
    "pg, paired": {"rollout__base_policy": "reference", "update__baseline": "paired"},
    "grpo": {"update__name": "grpo"},
    "ppo": {"update__name": "ppo", "update__epochs": 2},
    "rebel": {"update__name": "rebel"},
    "npg": {"update__name": "npg", "rollout__base_policy": "reference"},
    "subspace": {"update__subspace": {"rank": 4, "prompts": 16}},
    "bands": {"privacy__bands": 2},
}
"""What each run of private updates changes in the settings that all share."""

PAIRS = [
    {"prompt": f"user {i} ", "chosen": "a" * (1 + i % 3), "rejected": "b", "liked": i % 2}
    for i in range(40)
]


def private_update(model: str, changes: dict[str, Any], folder: Path) -> None:
    """Train for three rounds on 40 users."""
    dprlhf.train(
        **runs.run_settings(
            model, prompts=[f"user {i} says" for i in range(40)],
            evaluation_prompts=[f"public {i}" for i in range(48)], evaluation__prompts=16, rounds=3,
            rollout__responses=4, output_dir=folder, **changes,
        )
    )  # fmt: skip


def stage(name: str, folder: Path, **settings: Any) -> None:
    """Train a supervised stage for three rounds on 40 users."""
    shared = {"stage": name, "data": {"path": "in-memory"}, "privacy": {"epsilon": 8.0}}
    recipe = dprlhf.recipe.STAGES[name].model_validate(shared | {"rounds": 3} | settings)
    dprlhf.train_stage(recipe, data=PAIRS, output_dir=folder, quiet=True)


def all_runs(models: Path) -> dict[str, Callable[[Path], None]]:
    """Return each run by name, on models in a folder."""
    model = runs.save_sharp(models / "policy")
    encoder = DistilBertModel(DistilBertConfig(vocab_size=257, dim=32, n_layers=2, n_heads=4))
    encoder.save_pretrained(models / "encoder")
    tiny.tokenizer().save_pretrained(models / "encoder")
    policy = {"model_name_or_path": model, "adapter": runs.ADAPTER}
    adapter = runs.ADAPTER | {"target_modules": ["q_lin", "v_lin"]}
    start = {"model_name_or_path": str(models / "encoder"), "adapter": adapter}
    documents = {"path": "in-memory", "completion_column": "chosen"}
    logged = documents | {"label_column": "liked"}
    return {
        **{name: partial(private_update, model, changes) for name, changes in CHANGES.items()},
        "sft": partial(stage, "sft", policy=policy, data=documents),
        "dpo": partial(stage, "dpo", policy=policy),
        "feedback": partial(
            stage, "feedback", policy=policy, data=logged, update={"value_rounds": 1}
        ),
        "reward": partial(stage, "reward", policy=start),
    }


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def digests(folder: Path) -> dict[str, str]:
    """Hash what a run left: weights, metrics, and what its ledger promises and charges."""
    weights = load_file(folder / "checkpoint" / "policy.safetensors")
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    return {
        "weights": digest(*(n.encode() + t.numpy().tobytes() for n, t in sorted(weights.items()))),
        "ledger": digest(*(json.dumps([e["kind"], e["body"]]).encode() for e in ledger)),
        "metrics": digest((folder / "metrics.jsonl").read_bytes()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file.absolute()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fixed.fix_randomness()
    # The noise is drawn for the ledger's terms; this one follows from the settings' names.
    dprlhf.runs.opening.recipe_digest = lambda recipe: "0" * 64
    found = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        os.chdir(temporary)  # a run has the path of its model in its terms
        for name, run in all_runs(Path("models")).items():
            run(Path(name))
            found[name] = digests(Path(name))
    if not file.exists():
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(file.read_text(encoding="utf-8"))
    changed = [
        f"{name}: {part}"
        for name in kept
        for part in kept[name]
        if found.get(name, {}).get(part) != kept[name][part]
    ]
    print(f"{len(kept)} runs compared; changed:", ", ".join(changed) or "nothing")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
