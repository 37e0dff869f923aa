"""``dprlhf generate``: both policies side by side, from prompts given in any way."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dprlhf.cli.app import app
from dprlhf.data.public import in_memory_prompts
from dprlhf.generation import generate
from helpers import runs, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("generate")
    runs.train(str(tiny.save(base / "model")), base / "run", rounds=1, epsilon=8.0, delta=1e-3)
    return base / "run"


def call(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["generate", str(run), *arguments])


@pytest.mark.slow
def test_one_prompt_or_several_in_text_or_json(run: Path) -> None:
    shown = call(run, "--prompt", "One day", "--prompt", "Two")
    assert shown.exit_code == 0, shown.exception
    assert shown.stdout.count("  base:  ") == shown.stdout.count("  tuned: ") == 2
    answers = json.loads(call(run, "--prompt", "One day", "--prompt", "Two", "--json").stdout)
    assert answers == generate(run, ["One day", "Two"])
    assert [set(a) for a in answers] == [{"prompt", "base", "tuned"}] * 2


@pytest.mark.slow
def test_half_a_character_is_a_question_mark(run: Path) -> None:
    whole, half = generate(run, ["caf?"]), generate(run, ["caf\udce9"])
    assert half[0]["tuned"] == whole[0]["tuned"]
    assert call(run, "--prompt", "caf\udce9").exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", "One day\n\nTwo\n"),
        ("p", "One day\nTwo"),
        ("p.csv", "prompt,note\nOne day,a\nTwo,b\n"),
        ("p.jsonl", '{"prompt": "One day"}\n{"prompt": "Two"}\n'),
    ],
)
def test_prompts_from_a_file(run: Path, tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    expected = generate(run, ["One day", "Two"])
    assert generate(run, file) == expected
    assert json.loads(call(run, "--prompts", str(file), "--json").stdout) == expected


@pytest.mark.slow
def test_texts_are_what_users_say_where_prompts_were_conversations(run, tmp_path, monkeypatch):
    recipe, asked = shutil.copytree(run, tmp_path / "run") / "recipe.yaml", []
    recipe.write_text(recipe.read_text().replace("column: prompt", "column: messages"))
    seen = lambda given: asked.append(given) or in_memory_prompts(["as it is"])  # noqa: E731
    monkeypatch.setattr("dprlhf.generation.in_memory_prompts", seen)
    assert [answer["prompt"] for answer in generate(tmp_path / "run", ["One day"])] == ["One day"]
    file, said = tmp_path / "p.csv", [{"role": "user", "content": "One day"}]
    file.write_text('messages\n"[{""role"": ""user"", ""content"": ""One day""}]"\n')
    assert generate(tmp_path / "run", file)[0]["prompt"] == said
    assert asked == [[said], [said]]
