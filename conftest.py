"""Fixtures for the examples in the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "tests"))


@pytest.fixture(autouse=True)
def _hub_ids_are_local_folders(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the README where the hub id that it names is a folder, which transformers takes first."""
    if Path(str(request.node.fspath)).name == "README.md":
        import tiny

        tiny.save(tmp_path / "openai-community/gpt2")
        monkeypatch.chdir(tmp_path)
