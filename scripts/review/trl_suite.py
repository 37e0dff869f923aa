"""TRL's own tests of its GRPO and RLOO trainers, with the import changed and a budget added.

    git clone https://github.com/huggingface/trl
    PYTHONPATH=src python -m scripts.review.trl_suite ./trl

Writes rows to ``docs/results/review.json``. Nothing of the clone is kept.
What needs the hub is made here: models in the shapes of TRL's ``scripts/generate_tiny_models`` with
byte vocabularies and tokens beside them, so that random models seldom end a response; and prompts.
The budget is ε = ∞ and the range of the rewards wide: a test sees the algorithm, no noise and no
bound.

Left out are tests of images, vLLM, Liger and a GPU, and those of TRL's inside: its data loader, its
logger, and methods that begin with ``_``. The outcome of each other test is one of

- ``passed``;
- ``log``: it passed but for log fields that ``docs/reference/trl.md`` says a private run lacks;
- ``words``: it asks for an error of some type, and got that type with other words;
- ``refused``: a setting or argument is refused that the same page has a row for;
- ``private``: it asks for something that private rows must not do (:data:`PRIVATE`);
- ``failed``: anything else.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import functools
import inspect
import io
import json
import math
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from peft import PeftModel
from scripts.review.first_run import byte_tokenizer
from trl import import_utils

from dprlhf import trl as private
from dprlhf.errors import DprlhfError
from dprlhf.runs.measurements import Result, write_results
from dprlhf.trl.config import defaults
from dprlhf.trl.fields import ARGUMENTS, GRPO, LOG, RLOO

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs/results/review.json"
FILES = ("test_grpo_trainer.py", "test_rloo_trainer.py")
OUTCOMES = ("passed", "log", "words", "refused", "private", "failed")
PRIVATE = {
    "grpo: test_train_with_unknown_environment_raises": "a row whose environment does not exist"
    " ends TRL's run; here nobody's row can, and the released share of valid rewards warns",
}
"""Tests that ask for what private rows must not do, and what is done instead."""


OTHER = re.compile(
    r"requires (vision|vllm|liger|accelerator|bitsandbytes|kernels)|liger_kernel=True|use_vllm|"
    r"mock_generate|trainer\._[a-z]|Trainer\.(_|get_)|training_step|dataloader\(|caplog|"
    r"dispatch_batches|dataloader_num_workers == 0"
)
"""What a test's source has that concerns another package or TRL's inside."""

MISSING = [name for name, field in LOG.items() if field.kind == "absent"]
MISSING += ["rewards/*/mean", "reward"]
"""Log fields that a private run lacks, or that a round without users has none of."""

INTERNAL = ("HighEntropy", "RolloutDispatch", "ContinuousBatching", "VLM", "Slow")
"""Parts of the names of classes of such tests."""

SMALL = {
    "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 32, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
"""Settings of which each model takes those that it has."""
NEMOTRON = {
    "hidden_size": 16, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8,
    "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16,
    "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Cohere2ForCausalLM": ("cohere2", {}),
    "Gemma2ForCausalLM": ("gemma", {}),
    "Glm4MoeForCausalLM": ("glm4moe", {"head_dim": 2}),
    "GptOssForCausalLM": ("gptoss", {}),
    "LlamaForCausalLM-3.2": ("llama3_2", {}),
    "LlamaForSequenceClassification-3.2": ("llama3_2", {}),
    "MistralForCausalLM-0.2": ("llama3_2", {}),
    "NemotronHForCausalLM-nano": ("nemotron_3_nano", NEMOTRON),
    "Qwen2ForCausalLM-2.5": ("qwen2_5", {}),
    "Qwen2ForSequenceClassification-2.5": ("qwen2_5", {"hidden_size": 16}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3ForSequenceClassification": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3", {"head_dim": 16}),
}
"""The chat template of each model, without ``tiny-``, and settings of its own."""


def make_models(folder: Path) -> None:
    """Save each model with random weights, and one with code of its own."""
    for name, (template, settings) in MODELS.items():
        family, kind = name.split("-")[0].split("For")
        made = byte_tokenizer(template)
        made.add_tokens([f" w{number}" for number in range(8192)])
        labels = {"num_labels": 1} if kind == "SequenceClassification" else {}
        config = getattr(transformers, f"{family}Config")(
            vocab_size=len(made), bos_token_id=0, eos_token_id=2, pad_token_id=0,
            **{**SMALL, **settings, **labels},
        )  # fmt: skip
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}For{kind}")(config)
        for place in (model, made):
            place.save_pretrained(folder / f"tiny-{name}")
    llama = folder / "tiny-LlamaForCausalLM-3.2"
    remote = shutil.copytree(llama, folder / "tiny-RemoteForCausalLM")
    (remote / "remote.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class RemoteConfig(LlamaConfig):\n    model_type = 'remote'\n"
        "class RemoteForCausalLM(LlamaForCausalLM):\n    config_class = RemoteConfig\n"
    )
    config = json.loads((remote / "config.json").read_text()) | {"model_type": "remote"}
    parts = {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteForCausalLM"}
    config["auto_map"] = {name: f"remote.{own}" for name, own in parts.items()}
    (remote / "config.json").write_text(json.dumps(config))


def load_dataset(path: str, name: str, *, split: str | None = None, streaming: bool = False) -> Any:
    """Return beginnings of what ``import this`` prints, in the form that TRL's tests ask for."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    words = [line.split() for line in codecs.decode(this.s, "rot13").splitlines()[2:]]
    prompts: list[Any] = [" ".join(line[: max(1, 2 * len(line) // 3)]) for line in words]
    if name.startswith("conversational"):
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    splits = Dataset.from_dict({"prompt": prompts}).train_test_split(0.1, shuffle=False)
    if split is None:
        return splits
    return splits[split].to_iterable_dataset() if streaming else splits[split]


class Entry(dict[str, Any]):
    """An entry of ``log_history`` that answers for fields that a private run lacks, and says so."""

    missed = 0

    def __missing__(self, name: str) -> float:
        if not any(fnmatch(name, pattern) for pattern in MISSING):
            raise KeyError(name)
        type(self).missed += 1
        return math.nan

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or math.isnan(self[str(name)])


USUAL = (  # TRL's tests take their own defaults for granted
    "learning_rate", "adam_beta2", "lr_scheduler_type", "num_generations", "max_completion_length",
    "per_device_train_batch_size", "beta", "seed",
)  # fmt: skip


def without_bounds(config: Any, *given: Any, **settings: Any) -> Any:
    """Return a private config without noise, whose rewards are bounded where a test bounds them."""
    if "reward_clip_range" not in settings:
        settings["privacy_reward_range"] = 1e4
    usual = {name: value for name, value in defaults(config.trl_config).items() if name in USUAL}
    return config(*given, privacy_epsilon=math.inf, **usual | settings)


def budgeted(kind: type[Any], config: Any) -> type[Any]:
    """Return a private trainer with a budget where a test gives no settings at all."""

    class Budgeted(kind):  # type: ignore[misc]
        def __init__(self, *given: Any, **settings: Any) -> None:
            with tempfile.TemporaryDirectory() as place:
                settings.setdefault("args", config(output_dir=place, report_to="none"))
            if not isinstance(settings.get("model", given and given[0]), PeftModel):
                settings["peft_config"] = settings.get("peft_config") or {"type": "full"}
            super().__init__(*given, **settings)

        def train(self, *given: Any, **settings: Any) -> Any:
            done = super().train(*given, **settings)
            self.state.log_history = [Entry(one) for one in self.state.log_history]
            return done

        def evaluate(self, *given: Any, **settings: Any) -> Any:
            return Entry(super().evaluate(*given, **settings))

    return Budgeted


class Suite:
    """A plugin of pytest that changes the import, chooses the tests, and records outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the tests that concern both trainers, and change their modules' names."""
        kept = []
        for item in items:
            body = inspect.getsource(item.function).partition("def ")[2]
            marks = " ".join(str(mark) for mark in item.iter_markers("skipif"))
            other = OTHER.search(body) or OTHER.search(marks) or item.get_closest_marker("skip")
            if not other and not any(part in item.cls.__name__ for part in INTERNAL):
                kept.append(item)
        items[:] = kept
        for module in {item.module for item in kept}:
            for name in ("GRPO", "RLOO"):
                config = getattr(private, f"Private{name}Config")
                made = functools.partial(without_bounds, config)
                setattr(module, f"{name}Config", made)
                trainer = getattr(private, f"Private{name}Trainer")
                setattr(module, f"{name}Trainer", budgeted(trainer, made))
            module.load_dataset = load_dataset

    def pytest_runtest_setup(self) -> None:
        """Count anew the fields that a test misses."""
        Entry.missed = 0

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        """Record the outcome of a test, before TRL's own hook clears its traceback."""
        if call.when == "call" or call.excinfo:
            where = Path(str(item.fspath)).stem.split("_")[1]
            name = re.sub(r"/\S*/tiny-", "", f"{where}: {item.name}")
            outcome = self._outcome(call.excinfo)
            if outcome[0] == "failed" and name in PRIVATE:
                outcome = ("private", PRIVATE[name])
            self.outcomes[name] = outcome
        yield

    def _outcome(self, found: Any) -> tuple[str, str]:
        if found is None:
            return ("log" if Entry.missed else "passed"), ""
        error, said = found.value, " ".join(str(found.value).split())[:400]
        if isinstance(error, DprlhfError):
            named = re.match(r"[\w.]+", said)
            known = {**GRPO, **RLOO, **ARGUMENTS}  # the page is made of these
            return ("refused" if not named or named[0] in known else "failed"), said
        if isinstance(error, AssertionError):
            if "Regex pattern did not match" in said:
                return "words", said
            of_log = re.search("log_history|logged_keys", str(found.traceback[-1].statement))
            if of_log or (Entry.missed and re.search(r"\bnan\b", said)):
                return "log", said
        return "failed", f"{type(error).__name__}: {said}"


def main() -> None:
    """Run the tests and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trl", type=Path, help="a clone of TRL's repository")
    parser.add_argument("--only", default="", help="some of the tests, as pytest's -k")
    given = parser.parse_args()
    suite = Suite()
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        make_models(base / "models")
        tests = shutil.copytree(given.trl / "tests", base / "clone/tests")
        for file in FILES:
            text = (tests / file).read_text().replace("trl-internal-testing", f"{base}/models")
            (tests / file).write_text(text)
        # A clone may be of another version than the installed one, and need jmespath for tools.
        vars(import_utils).update(
            __getattr__=lambda name: lambda: False, is_jmespath_available=lambda: True
        )
        sys.path.insert(0, str(base / "clone"))
        sys.modules.pop("tests", None)
        transformers.utils.logging.set_verbosity_error()
        options = [*(str(tests / file) for file in FILES), "-q", "-p", "no:cacheprovider"]
        options += ["--rootdir", str(base / "clone"), "--basetemp", str(base / "out"), "--tb=short"]
        options += ["-c", "/dev/null", "-W", "ignore"]
        pytest.main([*options, *(["-k", given.only] if given.only else [])], plugins=[suite])
    for name, (kind, said) in suite.outcomes.items():
        print(f"{kind:8} {name}  {said}", flush=True)
    counted = Counter(kind for kind, _ in suite.outcomes.values())
    print(counted)
    if given.only:
        return
    rows = [Result("trl: TRL's own tests that concern both", len(suite.outcomes), "tests")]
    for kind in OUTCOMES:
        goal, holds = ("0", not counted[kind]) if kind == "failed" else ("", None)
        rows.append(Result(f"trl: TRL's own tests, {kind}", counted[kind], "tests", goal, holds))
    good = counted["passed"] + counted["log"]
    name = "trl: TRL's own tests that pass or differ in log fields alone"
    rows.append(Result(name, good, "tests", "at least 115", good >= 115))
    write_results(OUT, rows)


if __name__ == "__main__":
    main()
