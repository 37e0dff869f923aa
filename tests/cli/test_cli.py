"""The command line: its JSON is a contract, and bad input ends with one clear line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dprlhf.budget import Book
from dprlhf.cli.app import app
from dprlhf.privacy.accounting import Mechanism, epsilon
from dprlhf.runs.earlier import records_of
from helpers import tiny
from helpers.commands import dprlhf

pytestmark = pytest.mark.slow


def answer(*arguments: str) -> dict[str, Any]:
    done = dprlhf(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_commands_load_heavy_libraries_only_when_they_run() -> None:
    """Help and the accounting commands start without torch."""
    code = (
        "import sys; from typer.testing import CliRunner; from dprlhf.cli.app import app\n"
        "words = 'privacy noise --users 1000 --rounds 4 --epsilon 1 --delta 1e-5'.split()\n"
        "for command in (['--help'], ['train', '--help'], words):\n"
        "    assert CliRunner().invoke(app, command).exit_code == 0\n"
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


NOISE = "privacy noise --users 100 --rounds 10"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("bench control --table hz", "bench is gone: .* python -m papers.control"),
        (f"report {'a' * 300}", "File name too long"),
        (f"{NOISE} --epsilon 0 --delta 1e-5", "epsilon"),
        (f"{NOISE} --epsilon 1 --delta 1", "delta"),
        (f"{NOISE} --epsilon 1 --delta 1e-5 --partition shuffled", "shuffled"),
        (f"{NOISE} --epsilon 1 --delta 1e-5 --partition fixed --adjacency add-remove", "removing"),
    ],
)
def test_what_is_wrong_is_one_line(words: str, told: str) -> None:
    done = dprlhf(*words.split())
    assert done.returncode == 2
    assert re.fullmatch(f"dprlhf: .*{told}.*\n", done.stderr)


class TestPrivacy:
    def test_noise_keeps_within_epsilon(self) -> None:
        got = answer(
            "privacy", "noise", "--users", "23000", "--rounds", "16", "--epsilon", "4", "--delta",
            "1e-5", "--json",
        )  # fmt: skip
        assert set(got) == {"noise_multiplier", "epsilon", "best_guess"}
        assert 3.99 < got["epsilon"] <= 4
        assert 0.68 < got["noise_multiplier"] <= 0.693


RECIPE = """
policy: {{model_name_or_path: {model}, adapter: {{target_modules: [c_attn]}}}}
data: {{path: {data}}}
rewards: [{{function: "{folder}/r.py:reward"}}]
privacy: {{epsilon: 4}}
rounds: 2
"""


class TestBadRuns:
    @pytest.fixture
    def recipe(self, tmp_path: Path) -> Path:
        model = tiny.save(tmp_path / "model")
        (tmp_path / "r.py").write_text("def reward(prompts, completions):\n    return [1.0] * 9\n")
        data = tmp_path / "prompts.csv"
        data.write_text("prompt\n" + "\n".join(f"user {i}" for i in range(20)))
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE.format(model=model, data=data, folder=tmp_path))
        return path

    @pytest.mark.parametrize(
        ("override", "named"),
        [
            ("privacy.epsilon=0", "epsilon must be above 0"),
            ("rounds=21", "20 users cannot fill 21 rounds"),
            ("data.prompt_column=question", "no column 'question'"),
            ("data.path=missing.csv", "no such file"),
            ("policy.model_name_or_path=./nothing", "nothing"),
            ("rewards.0.function=nowhere:f", "nowhere"),
            ("policy.adapter.layers=[7]", "7, but the model has 2 layers"),
            ("rounds=2", "one finite number or None per completion|9"),
        ],
    )
    def test_one_line_and_nothing_charged(self, recipe: Path, override: str, named: str) -> None:
        run = recipe.parent / "run"
        done = dprlhf("train", str(recipe), override, "--output-dir", str(run), cwd=recipe.parent)
        assert done.returncode == 2, done.stderr[-2000:]
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("dprlhf: ")
        assert "Traceback" not in done.stderr
        assert re.search(named, last) or named in last
        ledger = run / "ledger.jsonl"
        assert not ledger.exists() or "charge" not in ledger.read_text()


def called(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


ACCOUNTED = ("--users", "1000", "--rounds", "8", "--delta", "1e-5")


@pytest.mark.parametrize(
    ("words", "mechanism"),
    [
        (["--releases-per-round", "4"], Mechanism(2.0, 8, releases_per_round=4)),
        (["--participations", "2"], Mechanism(2.0, 8, participations=2)),
        (["--bands", "2", "--partition", "fixed"], Mechanism(2.0, 8, "fixed", bands=2)),
    ],
)
def test_an_epsilon_is_of_every_option(words: list[str], mechanism: Mechanism) -> None:
    found = called("privacy", "epsilon", *ACCOUNTED, "--noise-multiplier", "2", *words)
    assert found["epsilon"] == epsilon(mechanism, 1e-5).epsilon


def test_a_push_is_private_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def push(run: Any, repository: str, private: bool = False) -> str:
        asked.append(private)
        return "address"

    monkeypatch.setattr("dprlhf.runs.publish.push", push)
    for words in ([], ["--public"]):
        assert CliRunner().invoke(app, ["push", "run", "me/mine", *words]).exit_code == 0
    assert asked == [True, False]


def test_a_budget_has_the_unit_and_is_adaptive_as_asked(tmp_path: Path) -> None:
    place = str(tmp_path / "book.db")
    words = ["budget", "create", "clinic", "--epsilon", "4", "--delta", "1e-5", "--book", place]
    words += ["--user-column", "who", "--adaptive"]
    assert CliRunner().invoke(app, words).exit_code == 0
    [made] = Book(place).read()["datasets"]
    assert (made["unit"], made["adaptive"]) == ("who", True)
    again = CliRunner().invoke(app, [*words, "--user-column", "who"])
    assert "a column is named twice" in str(again.exception)


def test_what_was_shuffled_is_declared_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = ["privacy", "declare", str(tmp_path), "--noise-multiplier", "1", "--sample-rate", "0.1"]
    words += ["--steps", "30", "--delta", "1e-5", "--shuffled", "--user-column", "who"]
    assert CliRunner().invoke(app, words).exit_code == 0
    [record] = records_of(tmp_path)
    assert record.unit == "who"
    assert record.mechanism["partition"] == "fixed"
    assert record.mechanism["releases_per_round"] == 3  # every row in every tenth step
