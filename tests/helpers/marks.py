"""Marks of parameters."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that ``make test-fast`` leaves out: there one of its kind is enough."""
    return pytest.param(*values, marks=pytest.mark.slow)
