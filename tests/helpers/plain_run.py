"""Run ``recipes/imdb_sentiment.yaml`` on tiny models, and print what a plain run loads.

For a process of its own: ``python -m helpers.plain_run`` prints one line of JSON at its end, with
the lines of the package's modules that were loaded, the files between the command line and the
optimizer's step, and with ``--functions`` the number of functions that ran before the first round.
"""

import inspect
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from helpers import tiny

ROOT = Path(__file__).parents[2]
SOURCE = str(ROOT / "src" / "dprlhf")


def save_recipe(folder: Path) -> Path:
    """Write the shipped recipe with a tiny policy, reward model and data."""
    settings: dict[str, Any] = yaml.safe_load((ROOT / "recipes/imdb_sentiment.yaml").read_text())
    settings["policy"]["model_name_or_path"] = str(tiny.save(folder / "policy", "llama"))
    settings["policy"]["adapter"]["layers"] = [1]
    names = {0: "NEGATIVE", 1: "POSITIVE"}
    config = DistilBertConfig(vocab_size=257, dim=32, hidden_dim=32, n_layers=1, n_heads=4)
    config.update({"id2label": names, "label2id": {name: i for i, name in names.items()}})
    DistilBertForSequenceClassification(config).save_pretrained(folder / "reward")
    tiny.tokenizer().save_pretrained(folder / "reward")
    settings["rewards"][0]["classifier"] = str(folder / "reward")
    for section, name in ((settings, "users"), (settings["evaluation"], "public")):
        file = folder / f"{name}.csv"
        file.write_text("text\n" + "".join(f"{name} {i}\n" for i in range(80)))
        section["data"].update(path=str(file), split="train")
    settings["data"]["limit"] = None
    settings["evaluation"]["prompts"] = 16
    settings["rounds"], settings["rollout"]["max_new_tokens"] = 2, 4
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def main() -> None:
    steps: list[list[str]] = []
    step = torch.optim.Adam.step

    def seen(self: Any, *given: Any, **named: Any) -> Any:
        files = [frame.filename for frame in traceback.extract_stack()]
        steps.append(list(dict.fromkeys(file for file in files if file.startswith(SOURCE))))
        return step(self, *given, **named)

    torch.optim.Adam.step = seen  # type: ignore[method-assign]
    functions: set[Any] = set()

    def called(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE):
            if code.co_name == "users_of_round":
                sys.setprofile(None)
            elif code.co_flags & inspect.CO_OPTIMIZED and code.co_name[0] != "<":
                functions.add(code)

    if "--functions" in sys.argv:
        sys.setprofile(called)
    from dprlhf.cli import app

    with tempfile.TemporaryDirectory(prefix="plain-") as name:
        folder = Path(name)
        sys.argv = ["dprlhf", "train", str(save_recipe(folder)), f"output_dir={folder / 'run'}"]
        app.app(standalone_mode=False)
    loaded = {
        str(module.__file__)
        for name, module in sys.modules.items()
        if name.startswith("dprlhf") and getattr(module, "__file__", None)
    }
    lines = {file: len(Path(file).read_text("utf-8").splitlines()) for file in sorted(loaded)}
    chain = max(steps, key=len)
    print(json.dumps({"lines": lines, "chain": chain, "functions": len(functions)}))


if __name__ == "__main__":
    main()
