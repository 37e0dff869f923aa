"""The package's own names, which are loaded on first use."""

import pytest

import dprlhf


@pytest.mark.parametrize("name", dprlhf.__all__)
def test_every_public_name_is_where_the_package_looks_for_it(name: str) -> None:
    assert getattr(dprlhf, name).__module__.startswith("dprlhf.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dprlhf.no_such_name
