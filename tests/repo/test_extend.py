"""The examples of the Extend page work: built in a copy of the source, their tests pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import extend_page
from extend_page import GOALS, Block, PageError

EXAMPLES = extend_page.examples()


@pytest.mark.parametrize("title", GOALS)
def test_an_example_touches_few_places(title: str) -> None:
    touched = extend_page.places(EXAMPLES[title])
    assert len(touched) <= GOALS[title], touched
    assert any(block.is_test for block in EXAMPLES[title])


@pytest.mark.slow
def test_the_examples_work(tmp_path: Path) -> None:
    """All in one copy, so that none gets in another's way."""
    extend_page.copy_source(tmp_path)
    tests = [test for blocks in EXAMPLES.values() for test in extend_page.build(blocks, tmp_path)]
    ran = extend_page.run_tests(tmp_path, tests)
    assert ran.returncode == 0, ran.stdout[-5000:]


def test_an_example_that_no_longer_fits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n")
    Block("diff", "a.py", " one\n+and a half\n two\n").write(tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\nand a half\ntwo\n"
    with pytest.raises(PageError, match="0 times"):
        Block("diff", "a.py", " one\n two\n").write(tmp_path)
    with pytest.raises(PageError, match="exists"):
        Block("python", "a.py", "three\n").write(tmp_path)
