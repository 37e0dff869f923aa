"""Fixtures of every test and of the examples in the documentation."""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "tests"))

# How long a machine takes to draw inputs depends on what else it does.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Wait for no disk, and compile the template of PEFT's model card once, not twice a run."""
    import jinja2

    from helpers import disk

    disk.skip_fsync()
    jinja2.Template = functools.cache(jinja2.Template)  # type: ignore[misc]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the processes of pytest-xdist begin with the files that take longest.

    Each takes a whole file at a time (``--dist loadfile``), so that what a file's tests share is
    made once; small files at the end leave no process without work. A slow test counts as fifty.
    """
    if not hasattr(config, "workerinput"):
        return
    weight: Counter[Path] = Counter()
    for item in items:
        weight[item.path] += 50 if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: -weight[item.path])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model and its tokenizer, to which no test writes."""
    from helpers import tiny

    return str(tiny.save(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _hub_ids_are_local_folders(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the README where the hub id that it names is a folder, which transformers takes first."""
    if Path(str(request.node.fspath)).name == "README.md":
        from helpers import tiny

        tmp_path = request.getfixturevalue("tmp_path")  # no folder for every other test
        tiny.save(tmp_path / "openai-community/gpt2")
        monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _float32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep models in float32 where a recipe leaves the dtype to the machine."""
    if Path(str(request.node.fspath)).name == "test_hardware.py":
        return
    importlib.import_module("dprlhf.hardware")  # from which others take it later

    def native_dtype(device_type: str | None = None) -> object:
        import torch

        return torch.float32

    for place in ("dprlhf.hardware", "dprlhf.policies.loading", "dprlhf.training.build"):
        if place in sys.modules:
            monkeypatch.setattr(f"{place}.native_dtype", native_dtype)


@pytest.fixture(autouse=True)
def _no_budget_book(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the runs of tests out of the budget book of whoever runs them."""
    for name in ("DPRLHF_BOOK", "DPRLHF_BOOK_KEY", "DPRLHF_BOOK_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _keys_follow_from_the_test(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give each run of a test its own key, the same ones every time.

    The noise of a run decides what it learns and sometimes when it stops: with keys of the
    operating system a test whose claim holds in 99 of 100 runs would fail once in a while.
    """
    numbers = itertools.count()
    path, _, rest = request.node.nodeid.partition("::")
    test = f"tests/{Path(path).name}::{rest}"  # wherever the file lies

    def key() -> bytes:
        return hashlib.sha256(f"{test} {next(numbers)}".encode()).digest()

    # Every charge of a test has one nonce, so that runs with one key draw the same noise: a resumed
    # run is compared with an unbroken one bit for bit.
    monkeypatch.setattr("dprlhf.privacy.ledger.new_nonce", lambda: "a test")
    # Where it is defined, for what a test imports, and where it was imported to: half of the
    # package, and with it seconds, were this to import them.
    monkeypatch.setattr("dprlhf.privacy.randomness.new_key", key)
    for place in ("dprlhf.runs.folder", "papers.regression.in_memory"):
        if place in sys.modules:
            monkeypatch.setattr(f"{place}.new_key", key)
