"""Does what a run leaves load elsewhere: a merged model through llama.cpp's converter, read back.

A short private run on SmolLM2 is merged, converted by llama.cpp's ``convert_hf_to_gguf.py``, and
read back from the GGUF file by transformers. Compared are logits and tokens with those of the run's
adapter. The converter is in llama.cpp's repository, and in the source package of llama-cpp-python:

    pip install sentencepiece
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz
    python scripts/servers.py --llama-cpp llama_cpp_python-*/vendor/llama.cpp
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dprlhf
from dprlhf.assets import resolve
from dprlhf.runs.measurements import Result, write_results
from dprlhf.runs.publish import merge

MODEL = "asset:smollm2-135m"
TEXTS = [
    "The film was", "Once upon a time, in a small town by the sea,", "def add(a, b):\n    return",
    "Größe, naïve, 你好, emoji 🙂", "1,234.5 + 6 =", "  two  spaces and\ta tab",
]  # fmt: skip
RESULTS = Path("docs/results/trl.json")
COMMAND = "python scripts/servers.py --llama-cpp llama.cpp"


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Reward short answers: any reward serves."""
    return [3 - len(text) / 20 for text in completions]


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens).logits.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run, merged, gguf = (Path(scratch) / name for name in ("run", "merged", "model.gguf"))
        dprlhf.train(
            model=MODEL,
            prompts=[f"Question {i}:" for i in range(8)],
            reward=length,
            epsilon=8.0,
            rounds=1,
            learning_rate=0.05,
            policy__dtype="float32",
            policy__adapter={"type": "lora", "rank": 1, "target_modules": ["v_proj"]},
            data__max_prompt_tokens=8,
            rollout__max_new_tokens=4,
            output_dir=run,
            quiet=True,
        )
        merge(run, merged)
        paths = [str(given.llama_cpp / "gguf-py"), os.environ.get("PYTHONPATH", "")]
        converter = given.llama_cpp / "convert_hf_to_gguf.py"
        subprocess.run(
            [sys.executable, converter, merged, "--outfile", gguf, "--outtype", "f32"],
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        tokenizer = AutoTokenizer.from_pretrained(merged)
        base = AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=torch.float32)
        untuned = base.eval()
        tokens = [torch.tensor([tokenizer(text)["input_ids"]]) for text in TEXTS]
        before = [logits(untuned, row) for row in tokens]
        tuned = peft.PeftModel.from_pretrained(base, str(run / "policy")).eval()
        wanted = [logits(tuned, row) for row in tokens]
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
        found = [logits(read, row) for row in tokens]
        again = AutoTokenizer.from_pretrained(**source)
        same = [again(text)["input_ids"] == tokenizer(text)["input_ids"] for text in TEXTS]
        off = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
        moved = max(float((a - b).abs().max()) for a, b in zip(before, wanted, strict=True))
    print(f"GGUF against adapter: {off:.3g}; adapter against base: {moved:.3g}; tokens: {same}")
    share, kept = off / moved, sum(same) / len(same)
    rows = [
        ("gguf_logits_over_the_adapters_change", share, "1", "at most 1e-3", share <= 1e-3),
        ("gguf_texts_with_the_same_tokens", kept, "1", "all", kept == 1),
    ]
    write_results(RESULTS, [Result(*row, command=COMMAND) for row in rows])


if __name__ == "__main__":
    main()
