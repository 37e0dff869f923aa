"""Runs one of TRL's examples on small local models and data, as it is or with its import changed.

    python scripts/from_trl/stand_ins.py trl EXAMPLE.py [--arguments of the example]
    python scripts/from_trl/stand_ins.py dprlhf EXAMPLE.py [--arguments of the example]

With ``dprlhf``, what a user changes is changed in the source: the import and the budget. What needs
the hub, a GPU or hours is replaced in both: models become a tiny random Qwen3 with TRL's own chat
template for it, datasets a few rows with the columns of the named data set, and sizes that only
cost time (steps, tokens, rows) are cut. Names that an example leaves to its reader (``model``,
``dataset``, ``reward_func``, ``...``) are filled in. The example itself is not copied or kept.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHANGED = ("GRPOTrainer", "GRPOConfig", "RLOOTrainer", "RLOOConfig")
BUDGET = 8.0
ROWS = 8

MATH = [
    {"problem": f"What is {i} + {i}?", "solution": f"\\boxed{{{2 * i}}}"} for i in range(2 * ROWS)
]
DATA: dict[str, list[dict[str, Any]]] = {
    "AI-MO/NuminaMath-TIR": [{**row, "messages": []} for row in MATH],
    "openai/gsm8k": [
        {"question": f"What is {i} + {i}?", "answer": f"Add them.\n#### {2 * i}"}
        for i in range(2 * ROWS)
    ],
    "trl-lib/tldr": [
        {"prompt": f"SUBREDDIT: r/a\nPOST: Day {i} of my trip.\nTL;DR:", "completion": " A trip."}
        for i in range(2 * ROWS)
    ],
    "qgallouedec/biogrid": [
        {"Alt IDs Interactor A": f"a{i}", "Taxid Interactor A": "taxid:9606"}
        for i in range(2 * ROWS)
    ],
    "qgallouedec/biogrid_qa": [
        {"question": f"Does the gene a{i} interact with a{i + 1}?", "answer": "yes"}
        for i in range(2 * ROWS)
    ],
}
"""A few rows with the columns of the data sets that the examples name."""
CONVERSATIONS = [
    {"prompt": [{"role": "user", "content": row["problem"]}], "solution": row["solution"]}
    for row in MATH
]
"""Rows of any other data set: conversations with a solution, as DeepMath-103K has them."""


def completed(source: str, *, private: bool) -> str:
    """Return the example as a program: with a trainer that trains, and without ``...``.

    Args:
        source: The example.
        private: Change the import and add the budget.
    """
    tree = _Changes(private).visit(ast.parse(source))
    calls = [_name(n) for n in ast.walk(tree) if isinstance(n, ast.Call)]
    kind = next(name[:4] for name in calls if name in CHANGED)
    if f"{kind}Trainer" not in calls:  # a page on one setting stops at the config
        tree.body += ast.parse(f"trainer = {kind}Trainer(args=training_args)").body
    if not re.search(r"\.train\(", source):
        tree.body += ast.parse("trainer.train()").body
    imported = {alias.asname or alias.name for alias in _imports(tree)}
    if f"{kind}Trainer" not in imported:
        line = f"from trl import {kind}Trainer, {kind}Config"
        tree.body[:0] = _Changes(private).visit(ast.parse(line)).body
    return ast.unparse(ast.fix_missing_locations(tree))


def _imports(tree: ast.AST) -> list[ast.alias]:
    return [a for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names]


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


class _Changes(ast.NodeTransformer):
    """Imports the private classes, adds the budget, and leaves out ``...``."""

    def __init__(self, private: bool) -> None:
        self._private = private

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if node.module != "trl" or not self._private:
            return node
        changed = [
            ast.alias(f"Private{a.name}", a.asname or a.name)
            for a in node.names
            if a.name in CHANGED
        ]
        others = [alias for alias in node.names if alias.name not in CHANGED]
        modules = (("dprlhf.trl", changed), ("trl", others))
        return [ast.ImportFrom(module, names, 0) for module, names in modules if names]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _name(node) not in CHANGED:
            return node
        node.args = [arg for arg in node.args if not _is_ellipsis(arg)]
        if not self._private:
            return node
        if _name(node).endswith("Config"):
            node.keywords.append(ast.keyword("privacy_epsilon", ast.Constant(BUDGET)))
        elif not any(keyword.arg == "args" for keyword in node.keywords):
            config = f"dprlhf.trl.Private{_name(node).removesuffix('Trainer')}Config"
            built = ast.parse(f"{config}('out', privacy_epsilon={BUDGET})", mode="eval").body
            node.keywords.append(ast.keyword("args", built))
        return node

    def visit_List(self, node: ast.List) -> ast.AST:
        node.elts = [x for x in node.elts if not _is_ellipsis(x)]
        return node


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def byte_tokenizer(template: str) -> Any:
    """Return a byte-level tokenizer with one of TRL's chat templates."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|finetune_right_pad_id|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=special[0], eos_token=special[2], pad_token=special[0],
        additional_special_tokens=special[1:],
    )  # fmt: skip
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text()
    return tokenizer


def tiny_model(folder: Path) -> Path:
    """Save a two-layer random Qwen3 with a byte vocabulary and TRL's chat template of Qwen3."""
    tokenizer = byte_tokenizer("qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_dataset(path: str, *_: Any, split: Any = None, **__: Any) -> Any:
    """Return a few rows with the data set's columns, others in each split."""
    rows = datasets.Dataset.from_list(DATA.get(path, CONVERSATIONS))
    train, test = rows.select(range(ROWS)), rows.select(range(ROWS, 2 * ROWS))
    if isinstance(split, list):
        return [test if "test" in name else train for name in split]
    return train if split else datasets.DatasetDict(train=train, test=test)


def lengths(completions: list[Any], **_: Any) -> list[float]:
    """Score a completion by its length: the reward of examples that leave it to the reader."""
    return [float(len(str(c))) for c in completions]


def cut(config: type[Any], model: Path) -> None:
    """Make each config small: what is cut costs time and changes nothing that is tried."""
    original = config.__init__

    def init(self: Any, *args: Any, **given: Any) -> None:
        # TRL's parser passes every field, so defaults are given here as well.
        given["max_steps"] = 2
        given["max_completion_length"] = min(given.get("max_completion_length") or 16, 16)
        given["num_generations"] = min(given.get("num_generations") or 8, 8)
        if given.get("per_device_train_batch_size", 0) > 4 * ROWS:
            given["per_device_train_batch_size"] = 4 * ROWS
        given |= {"report_to": "none", "use_cpu": True, "bf16": False, "push_to_hub": False}
        if given.get("use_vllm") and given.get("vllm_mode", "colocate") == "colocate":
            given["use_vllm"] = False  # the same samples, from a package that needs a GPU
        if "privacy_epsilon" in given:  # here a token is a byte
            given["privacy_max_prompt_tokens"] = 3000
        if not args and not given.get("output_dir"):
            given["output_dir"] = "out"
        original(self, *args, **given)

    config.__init__ = init


def fill(trainer: type[Any], model: Path) -> None:
    """Give each trainer the tiny model, and what its example leaves out."""
    original = trainer.__init__

    def init(self: Any, *args: Any, **given: Any) -> None:
        if not args:
            given["model"] = str(model)
        data = given.get("train_dataset")
        if data is None and not given.get("environment_factory"):
            given["train_dataset"] = datasets.Dataset.from_list(CONVERSATIONS)
        elif data is not None and len(data) > ROWS:
            given["train_dataset"] = data.select(range(ROWS))
        if not given.get("reward_funcs") and not given.get("environment_factory"):
            given["reward_funcs"] = lengths
        original(self, *args, **given)

    trainer.__init__ = init
    trainer.push_to_hub = lambda *_, **__: None


def main() -> None:
    """Run the example that the command line names."""
    package, path, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = path
    private = package == "dprlhf"
    module = importlib.import_module("dprlhf.trl" if private else "trl")
    model = tiny_model(Path("model").absolute())
    for name in CHANGED:
        change = fill if name.endswith("Trainer") else cut
        change(getattr(module, f"Private{name}" if private else name), model)
    datasets.load_dataset = load_dataset
    transformers.utils.logging.set_verbosity_error()
    namespace: dict[str, Any] = {
        "__name__": "__main__",
        "dprlhf": sys.modules.get("dprlhf"),
        "model": "model",
        "dataset": datasets.Dataset.from_list(CONVERSATIONS),
        **dict.fromkeys(("reward_func", "accuracy_reward", "format_reward"), lengths),
        **dict.fromkeys(("check_math_solution", "test_code_solution"), lambda *_: True),
    }
    exec(compile(completed(Path(path).read_text(), private=private), path, "exec"), namespace)


if __name__ == "__main__":
    main()
