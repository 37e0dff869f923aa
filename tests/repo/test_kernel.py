"""The kernel, what must be right for ε to be true, is closed, small, and named on one page."""

import importlib
import re
from pathlib import Path

from helpers import house

test_boundary = importlib.import_module("test_boundary")

PAGE = Path(__file__).parents[2] / "docs" / "kernel.md"
MOST_LINES = 5_400

OUTSIDE = {
    "errors": "what a message says changes no value",
    "hardware": "moves tensors between devices",
    "policies.causal_lm": "the loss that is differentiated; compared with autograd at each start",
    "policies.refusals": "refuses layers that mix rows",
    "policies.protocol": "types of rows",
    "privacy.file_times": "the dates of files, which tell no ε",
    "rollout": "the type of sampled rows",
}
"""What the kernel may import beside itself, by module or room, with the reason."""


def kernel() -> set[str]:
    """Return the modules that the page names, without the package's name."""
    rows = re.findall(r"^\| (`.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named: set[str] = set()
    for row in rows:
        first, *others = re.findall(r"`([\w.]+)`", row)
        parent = first.rpartition(".")[0]
        named |= {first, *(parent + other if other[0] == "." else other for other in others)}
    return named - {"dprlhf"}


def test_the_page_names_modules_that_exist() -> None:
    modules = {name.removeprefix("dprlhf.") for name in house.read_modules()}
    assert len(kernel()) > 20
    assert kernel() <= modules


def test_the_kernel_imports_itself_and_what_is_named() -> None:
    own = kernel() | {name.rpartition(".")[0] for name in kernel()}
    arrows = house.read_arrows(house.read_modules())
    beyond = {
        a.imported.removeprefix("dprlhf.")
        for a in arrows
        if a.importer.removeprefix("dprlhf.") in kernel()
    } - own
    assert beyond <= OUTSIDE.keys(), f"the kernel grew: {sorted(beyond - OUTSIDE.keys())}"


def test_who_makes_sums_and_releases_is_in_the_kernel() -> None:
    makers = {
        module.replace("/", ".")
        for name in ("BoundedSum", "Released", "rounded_gaussian", "charge")
        for module in test_boundary.ALLOWED[name]
    }
    papers = {m for m in makers if m.startswith(("papers.", "audit."))}
    assert makers - papers <= kernel()


def test_the_kernel_can_be_read_in_a_day() -> None:
    lines = {
        name: len((house.SOURCE / (name.replace(".", "/") + ".py")).read_text().splitlines())
        for name in kernel()
    }
    assert sum(lines.values()) <= MOST_LINES, sorted(lines.items(), key=lambda entry: -entry[1])
