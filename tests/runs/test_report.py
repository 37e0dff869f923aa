"""The report: it loads nothing, says what is wrong, and shows what a run published."""

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from dprlhf.runs.report import read_run, render, write_report
from helpers import runs, tiny

CANARY = "canary-of-a-user"
ROUNDS = 4
VOID = {"meta", "br", "link", "img", "input", "hr"}
SECTIONS = [
    "Reward on public prompts", "What privacy cost: noise against signal", "What a guess can gain",
    "Continuations of public prompts", "Reward on private prompts, noised",
    "Users with valid rewards, noised", "Time by phase", "Privacy card", "Recipe",
]  # fmt: skip


class Page(HTMLParser):
    """What a browser would find: tags, attributes, texts; an unbalanced tag fails."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            for tag in set(self._open):
                self.texts.setdefault(tag, []).append(data.strip())


def problems(html: str) -> str:
    """What stands above everything else."""
    return " ".join(Page(html[: html.index("<main>")] + "</body></html>").texts.get("li", []))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("report")
    model = str(tiny.save(base / "model"))
    runs.train(
        model, base / "run", rounds=ROUNDS, epsilon=8.0, delta=1e-3, optimizer__learning_rate=0.5,
        evaluation_prompts=[f"public {i} <script>alert({i})</script>" for i in range(12)],
        evaluation__every=2, data__max_prompt_tokens=64,
    )  # fmt: skip
    return base / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def finished_model(run: Path) -> str:
    return str(yaml.safe_load((run / "recipe.yaml").read_text())["policy"]["model_name_or_path"])


class TestWholeRun:
    def test_every_section_and_no_problem(self, run: Path) -> None:
        html = write_report([run]).read_text()
        page = Page(html)
        assert page.texts["h3"] == SECTIONS
        assert problems(html) == ""
        assert html.count('class="bar"') >= 4 * ROUNDS
        date = json.loads((run / "privacy.json").read_text())["date"]
        assert page.texts["h1"] == [f"{finished_model(run)}, given in Python, {date}"]
        assert "This run has no such values" not in html
        assert "Not measured in this run" not in html

    def test_nothing_is_loaded_and_nothing_runs(self, run: Path) -> None:
        html = write_report([run]).read_text()
        page = Page(html)
        assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page.tags)
        names = [name for name, _ in page.attributes]
        assert not {"src", "srcset", "action", "data", "xlink:href"} & set(names)
        assert not [n for n in names if n.startswith("on")]
        assert all((v or "").startswith("#") for n, v in page.attributes if n == "href")
        assert "@import" not in html
        assert "url(" not in html
        assert ("http-equiv", "Content-Security-Policy") in page.attributes
        assert "&lt;script&gt;alert(3)" in html  # a sample's text is text

    def test_secret_is_never_read(self, run: Path) -> None:
        with_secret = render([read_run(run)])
        for file in (run / "secret").iterdir():
            file.write_text(CANARY)
        (run / "secret/metrics.jsonl").write_text(f'{{"round": 1, "note": "{CANARY}"}}\n')
        assert render([read_run(run)]) == with_secret
        shutil.rmtree(run / "secret")
        assert render([read_run(run)]) == with_secret
        assert CANARY not in with_secret


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "garbage": lambda file: file.write_bytes(b"\x80\xff\n{\x00"),
    "another kind": lambda file: file.write_text("7\n"),
}


class TestDamage:
    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            ("metrics.jsonl", "empty"), ("metrics.jsonl", "cut off"), ("recipe.yaml", "missing"),
            ("privacy.json", "another kind"), ("ledger.jsonl", "garbage"),
            ("samples.json", "missing"), ("evaluation.json", "cut off"),
        ],
    )  # fmt: skip
    def test_it_is_named_at_the_top_and_the_rest_is_shown(self, run, name, damage):
        DAMAGE[damage](run / name)
        html = write_report([run]).read_text()
        assert Page(html).texts["h3"] == SECTIONS
        # A run without public prompts has no samples either.
        assert (name in problems(html)) == ((name, damage) != ("samples.json", "missing"))
        assert problems(html).count("evaluation.json") <= 1

    def test_not_private(self, run: Path) -> None:
        card = json.loads((run / "privacy.json").read_text())
        card |= {"private": False, "epsilon": "infinity", "noise_multiplier": 0.0}
        (run / "privacy.json").write_text(json.dumps(card))
        html = write_report([run]).read_text()
        assert "No privacy: this run added no noise." in problems(html)
        assert "Guarantee.</strong> No privacy" in html
