"""The examples of ``docs/extend.md``: taken out of the page, built in a copy of ``src``, counted.

An example is a section of the page. Its code blocks carry the path of the file that one writes
(``title="src/dprlhf/…"``); a block in ``diff`` holds lines of a file that is there, with what is
added and taken away. ``tests/repo/test_extend.py`` builds all examples and runs their tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "extend.md"

GOALS = {
    "An online update": 7,
    "An offline objective": 4,
    "A partition with its accountant": 2,
    "A file format": 1,
    "A reward": 1,
}
"""The sections of the page, and how many files each may add or change, beside its test."""

_FENCE = re.compile(r'^``` ?(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class PageError(Exception):
    """The page is not of the form that is asked for, or the source no longer matches it."""


@dataclass(frozen=True)
class Block:
    """A titled code block.

    Attributes:
        language: ``diff`` changes a file, all else writes one.
        path: of the file, below the root of the repository.
        text: what stands in the block.
    """

    language: str
    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the block is the example's own test, a new file."""
        return self.path.startswith("tests/") and self.language != "diff"

    def write(self, root: Path) -> None:
        """Write or change the file below ``root``.

        Raises:
            PageError: lines that a diff changes are not there exactly once.
        """
        file = root / self.path
        if self.language != "diff":
            if file.exists():
                raise PageError(f"{self.path} exists: show what changes in a block of diff")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.text)
            return
        source = file.read_text()
        for hunk in re.split(r"^@@.*\n", self.text, flags=re.MULTILINE):
            if not hunk:
                continue
            lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines(keepends=True)]
            old = "".join(text or "\n" for mark, text in lines if mark != "+")
            new = "".join(text or "\n" for mark, text in lines if mark != "-")
            if source.count(old) != 1:
                raise PageError(f"{self.path} has these lines {source.count(old)} times:\n{old}")
            source = source.replace(old, new)
        file.write_text(source)


def examples(page: Path = PAGE) -> dict[str, list[Block]]:
    """Return the blocks of each section, in the order of the page.

    Raises:
        PageError: a section is missing.
    """
    found = {}
    for section in page.read_text().split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        if title in GOALS:
            found[title] = [Block(*groups) for groups in _FENCE.findall(body)]
    if missing := [title for title in GOALS if not found.get(title)]:
        raise PageError(f"{page.name} has no example in {', '.join(missing)}")
    return found


def places(blocks: list[Block]) -> list[str]:
    """Return the files that an example adds or changes, beside its own new test."""
    return sorted({b.path for b in blocks if not b.is_test})


def build(blocks: list[Block], root: Path) -> list[Path]:
    """Write an example into a copy of the source; return its tests."""
    for block in blocks:
        block.write(root)
    return [root / block.path for block in blocks if block.is_test]


def copy_source(root: Path) -> None:
    """Copy what the examples change, and nothing else; compiled as it is, which saves seconds."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, root / name)


def run_tests(root: Path, tests: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run the tests of examples that were built in a copy of the source."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-c", os.devnull, "-p", "no:cacheprovider",
         f"--rootdir={root}", "--import-mode=importlib", *map(str, tests)],
        cwd=root, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # PEFT imports bitsandbytes where it is installed, and that torch's compiler, for seconds.
        env={**os.environ, "PYTHONPATH": str(root / "src"), "TORCHDYNAMO_DISABLE": "1"},
    )  # fmt: skip
