"""Some hundred cases of each target of the fuzzer; ``scripts/fuzz.py`` runs a hundred thousand."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from helpers import fuzz, tiny


@pytest.fixture(scope="module", autouse=True)
def _one_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUZZ_MODEL", str(tiny.save(Path(tmp_path_factory.mktemp("fuzz")))))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("target", fuzz.TARGETS)
@pytest.mark.filterwarnings("default")
def test_a_clear_error_or_a_correct_result(target: str) -> None:
    strategy, check, number = fuzz.TARGETS[target]
    cases = []

    @settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def fuzzed(case: Any) -> None:
        cases.append(1)
        check(case)

    fuzzed()
    assert len(cases) >= number
    assert target != "run" or fuzz.ended >= 1  # the others were refused, as they should be
