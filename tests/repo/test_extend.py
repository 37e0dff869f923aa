"""The examples of the Extend page work: built in a copy of the source, their tests pass."""

import os
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
    output = tmp_path / "output"
    child = os.fork()  # the libraries are loaded; the package and the helpers are the copy's
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        for name in list(sys.modules):
            if name.partition(".")[0] in ("dprlhf", "helpers", "conftest"):
                del sys.modules[name]
        sys.path[:0] = [str(tmp_path / "src"), str(tmp_path / "tests")]
        os.chdir(tmp_path)
        os.environ.pop("PYTEST_XDIST_WORKER", None)
        options = ("-q", "-x", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "no:xdist")
        words = [*options, f"--rootdir={tmp_path}", "--import-mode=importlib", *map(str, tests)]
        os._exit(pytest.main(words))
    assert os.waitpid(child, 0)[1] == 0, output.read_text()[-5000:]


def test_an_example_that_no_longer_fits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n")
    Block("diff", "a.py", " one\n+and a half\n two\n").write(tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\nand a half\ntwo\n"
    with pytest.raises(PageError, match="0 times"):
        Block("diff", "a.py", " one\n two\n").write(tmp_path)
    with pytest.raises(PageError, match="exists"):
        Block("python", "a.py", "three\n").write(tmp_path)
