"""Values that YAML cannot read, and settings that are gone: one line names each."""

from pathlib import Path

import pytest

from dprlhf.errors import DprlhfError
from dprlhf.recipe import load_any_recipe

UNREADABLE = ["2024-99-99", "!!int x", "!!int ''", "!!bool maybe", "!!timestamp x", "0x_", "[a"]
"""Values that YAML's own types refuse, each with an error of its own."""


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_yaml_cannot_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    for content, overrides in ((f"rounds: {text}", []), ("rounds: 3", [f"data.name={text}"])):
        file.write_text(content)
        with pytest.raises(DprlhfError, match="not valid YAML") as caught:
            load_any_recipe(file, overrides)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[a]", "{a: b}", "2024-01-01"])
def test_a_stage_of_a_recipe_that_is_no_word(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("rounds: 3")
    with pytest.raises(DprlhfError, match="stage: it is one of") as caught:
        load_any_recipe(tmp_path / "recipe.yaml", [f"stage={text}"])
    assert "\n" not in str(caught.value)
