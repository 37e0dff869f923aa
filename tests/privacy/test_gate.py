"""The gate: charge first, then noise of exactly zS, divided by a public constant."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dprlhf.boundary import BoundedSum, Released
from dprlhf.errors import DprlhfError
from dprlhf.privacy import gate as module
from dprlhf.privacy import rounded_gaussian
from dprlhf.privacy.correlated_noise import square_root
from dprlhf.privacy.gate import Gate
from dprlhf.privacy.ledger import Ledger, new_nonce, read_ledger
from dprlhf.privacy.plan import Plan, make_plan
from dprlhf.privacy.rounded_gaussian import grid_of
from helpers.rounds import value_of

KEY, OTHER = bytes(range(32)), bytes(32)


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "users": 70, "rounds": 4, "delta": 1e-5, "noise_multiplier": 1.5, "clip_norm": 0.4,
    }  # fmt: skip
    return make_plan(**(values | changes))


def zeros(p: Plan, dimension: int = 6) -> BoundedSum:
    return BoundedSum(torch.zeros(dimension, dtype=torch.float64), p.clip_norm)


@pytest.fixture
def gate(tmp_path: Path) -> Callable[..., Gate]:
    """Make gates over ledgers of their own."""
    count = 0

    def make(p: Plan | None = None, key: bytes = KEY, **terms: Any) -> Gate:
        nonlocal count
        count += 1
        p = p or plan()
        return Gate(p, Ledger(tmp_path / f"{count}.jsonl", p.terms() | terms), key)

    return make


@pytest.mark.parametrize("bands", [1, 3])
def test_the_noise_does_not_depend_on_the_device(gate, bands, monkeypatch):
    """It is drawn and added on the CPU, whatever device tensors are made on by default."""
    monkeypatch.setattr("dprlhf.privacy.ledger.new_nonce", lambda: "0" * 32)
    p = plan(partition="fixed", bands=bands) if bands > 1 else plan()
    gates = [gate(p), gate(p)]
    for t in (1, 2):
        sums = [zeros(p, 9) for _ in gates]
        with torch.device("meta"):  # where nothing has a value
            elsewhere = value_of(gates[0].release(t, sums[0]))
        here = value_of(gates[1].release(t, sums[1]))
        assert elsewhere.device.type == "cpu"
        assert torch.equal(elsewhere, here)
        assert float(here.abs().min()) > 0


def test_the_ledger_is_charged_on_disk_before_noise_is_drawn(gate, monkeypatch):
    g = gate()
    real = module.rounded_gaussian
    seen: list[list[int]] = []

    def noise(*args: Any, **kwargs: Any) -> torch.Tensor:
        on_disk = read_ledger(g.ledger.path)
        seen.append([e.body["round"] for e in on_disk if e.kind == "charge"])
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "rounded_gaussian", noise)
    g.release(1, zeros(g.plan))
    g.release(3, zeros(g.plan))
    assert seen == [[1], [1, 3]]  # once for each release, after its own charge


@pytest.mark.parametrize("problem", ["spent", "full disk", "outside", "other norm", "other plan"])
def test_nothing_is_drawn_when_the_charge_fails(gate, monkeypatch, problem):
    g = gate()
    g.release(1, zeros(g.plan))
    before = g.ledger.path.read_bytes()
    drawn: list[int] = []
    monkeypatch.setattr(module, "rounded_gaussian", lambda *a, **k: drawn.append(1))
    round_, bounded = 2, zeros(g.plan)
    if problem == "spent":
        round_ = 1
    elif problem == "outside":
        round_ = 5
    elif problem == "other norm":
        bounded = BoundedSum(bounded.total, 0.5)
    elif problem == "other plan":
        g = Gate(plan(noise_multiplier=1.4), g.ledger, KEY)
    else:

        def full(*args: Any, **kwargs: Any) -> None:
            raise DprlhfError("the ledger could not be written")

        monkeypatch.setattr(g.ledger, "charge", full)
    with pytest.raises(DprlhfError):
        g.release(round_, bounded)
    assert not drawn
    assert g.ledger.path.read_bytes() == before


def test_a_round_is_released_once_also_after_reopening(gate: Callable[..., Gate]) -> None:
    g = gate()
    g.release(2, zeros(g.plan))
    for spent in (2, 1):
        with pytest.raises(DprlhfError, match="charged before: its users are spent"):
            g.release(spent, zeros(g.plan))
    g.ledger.close()
    again = Gate(g.plan, Ledger(g.ledger.path, g.plan.terms()), KEY)
    with pytest.raises(DprlhfError, match="charged before"):
        again.release(2, zeros(g.plan))
    again.release(3, zeros(g.plan))


@pytest.mark.parametrize("norm", [0.39999999, 0.40000001, 1.0, math.inf, math.nan])
def test_a_sum_clipped_to_another_norm_is_refused(gate: Callable[..., Gate], norm: float) -> None:
    g = gate()
    with pytest.raises(DprlhfError, match=r"not the planned\s+clip_norm 0.4"):
        g.release(1, BoundedSum(torch.zeros(2, dtype=torch.float64), norm))
    assert g.ledger.charged == frozenset()


def test_inner_releases_share_one_charge_and_no_noise(gate: Callable[..., Gate]) -> None:
    g = gate(plan(releases_per_round=3))
    n = 50_000
    noises = [value_of(g.release(t, zeros(g.plan, n))) for t in (1, 1, 1, 2, 2)]
    assert [e.body["round"] for e in g.ledger.entries if e.kind == "charge"] == [1, 2]
    assert g.ledger.entries[1].body["releases_per_round"] == 3
    for noise in noises:
        assert has_std(noise.numpy(), 1.5 * 0.4 / 17.5)
    assert np.abs(np.corrcoef(np.stack(noises)) - np.eye(5)).max() < 5 / math.sqrt(n)


def test_more_inner_releases_than_planned_are_refused(gate: Callable[..., Gate]) -> None:
    g = gate(plan(releases_per_round=2))
    g.release(1, zeros(g.plan))
    g.release(1, zeros(g.plan))
    with pytest.raises(DprlhfError, match=r"charged before.*planned for a round: 2"):
        g.release(1, zeros(g.plan))
    g.release(2, zeros(g.plan))
    with pytest.raises(DprlhfError, match="charged before"):
        g.release(1, zeros(g.plan))


def difference_after_restoring(folder, first, second, p):
    """Release round 2 in a run, and again in a copy of its folder made before; subtract."""
    ledger = Ledger(folder / "run.jsonl", p.terms())
    Gate(p, ledger, KEY).release(1, zeros(p, len(first)))
    ledger.close()
    shutil.copy(folder / "run.jsonl", folder / "backup.jsonl")
    released = []
    for name, total in (("run", first), ("backup", second)):
        ledger = Ledger(folder / f"{name}.jsonl", p.terms())
        released.append(value_of(Gate(p, ledger, KEY).release(2, BoundedSum(total, p.clip_norm))))
        ledger.close()
    return ((released[0] - released[1]) * p.expected_batch_size).numpy()


@pytest.mark.parametrize("changes", [{}, {"partition": "fixed", "bands": 3}], ids=str)
def test_a_restored_run_folder_draws_fresh_noise(tmp_path, monkeypatch, changes):
    """Else subtracting the two releases of a round would show how the sums differ, exactly."""
    p, n = plan(**changes), 20_000
    one, other = torch.zeros(2, n, dtype=torch.float64)
    other[3] = 0.4  # what a user adds
    (repeated := tmp_path / "repeated").mkdir()
    shown = difference_after_restoring(repeated, one.clone(), other.clone(), p)
    np.testing.assert_allclose(shown, (one - other).numpy(), rtol=0, atol=1e-9)  # the control
    monkeypatch.setattr("dprlhf.privacy.ledger.new_nonce", new_nonce)
    shown = difference_after_restoring(tmp_path, one.clone(), other.clone(), p)
    assert has_std(shown, math.sqrt(2) * 1.5 * 0.4 / (square_root(4, p.bands)[1, 0]))


def has_std(x: np.ndarray[Any, Any], std: float) -> bool:
    n = len(x)
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], n)
    return bool(low < (x**2).sum() / std**2 < high) and bool(
        stats.kstest(x / std, "norm").pvalue > 1e-4
    )


@pytest.mark.parametrize(
    ("changes", "expected_batch_size"),
    [
        ({}, 70 / 4),
        ({"participations": 2}, 2 * 70 / 4),
        ({"partition": "fixed"}, 17),
        ({"partition": "fixed", "adjacency": "replace-one"}, 17),
    ],
    ids=str,
)
def test_noise_has_std_zs_over_m(gate, changes, expected_batch_size):
    g = gate(plan(**changes))
    n = 400_000
    x = value_of(g.release(1, zeros(g.plan, n))).numpy()
    std = 1.5 * 0.4 / expected_batch_size
    assert has_std(x, std)
    for wrong in (1.01 * std, 0.99 * std, std / 1.5, std / 0.4, std * expected_batch_size):
        assert not has_std(x, wrong)


@pytest.mark.parametrize("length", [1, 999, 1000, 1001, 2000, 2357])
def test_every_piece_of_a_long_release_is_noised(gate, monkeypatch, length):
    """Long releases get their noise in pieces: the last, incomplete one gets it, too."""
    monkeypatch.setattr(module, "_PIECE", 1000)
    g = gate(plan())
    x = value_of(g.release(1, zeros(g.plan, length))).numpy() / (1.5 * 0.4 / (70 / 4))
    assert (x != 0).all()
    assert len(set(x)) == length  # no piece repeats another
    assert has_std(x, 1.0) or length == 1
    if length > 2000:
        assert has_std(x[2000:], 1.0)


def test_noise_is_added_to_the_sum_before_the_division(gate: Callable[..., Gate]) -> None:
    total = torch.linspace(-3, 3, 7, dtype=torch.float64)
    p = plan()
    with_sum = gate(p).release(1, BoundedSum(total.clone(), 0.4))  # it is used up
    without = gate(p).release(1, zeros(p, 7))
    # The same terms and key: the same noise, so the difference is the sum over the divisor.
    difference = value_of(with_sum) - value_of(without)
    np.testing.assert_allclose(difference, total / 17.5, rtol=0, atol=1e-10)
    assert isinstance(with_sum, Released)
    assert with_sum.t == 1
    assert value_of(with_sum).dtype == torch.float64
    assert value_of(with_sum).shape == (7,)


def test_noise_is_fresh_in_every_round_run_and_key(gate: Callable[..., Gate]) -> None:
    n = 50_000
    p = plan()
    first = gate(p, commitment="a")
    second = gate(p, commitment="b")  # the same key under another ledger
    left_out = gate(p, commitment="a")
    noises = [
        *(value_of(first.release(t, zeros(p, n))) for t in (1, 2, 3)),
        value_of(second.release(1, zeros(p, n))),
        value_of(gate(p, OTHER, commitment="a").release(1, zeros(p, n))),
        value_of(left_out.release(2, zeros(p, n))),  # the same round with another history
    ]
    correlations = np.corrcoef(np.stack(noises)) - np.eye(len(noises))
    assert np.abs(correlations).max() < 5 / math.sqrt(n)


def test_what_is_released_lies_on_a_grid_that_no_user_decides(gate: Callable[..., Gate]) -> None:
    """A rest of the sum beside the grid would show through integer noise."""
    p, n = plan(), 999
    spacing = grid_of(p.noise_multiplier, p.clip_norm, n).spacing
    for total in (torch.zeros(n), torch.linspace(-3, 3, n), torch.linspace(-3, 3, n) * 1e5 / 7):
        value = value_of(gate(p).release(1, BoundedSum(total.double(), p.clip_norm)))
        points = value.numpy() * 17.5 / spacing
        np.testing.assert_allclose(points, np.rint(points), rtol=2.0**-50, atol=1e-5)
        if total.abs().max() < 4:
            assert np.abs(points - np.rint(points)).max() < 1e-4


def test_the_noise_covers_the_rounding_of_the_sum(gate, monkeypatch):
    """On a coarse grid of 2⁴ points to a standard deviation its share of the noise is seen."""
    monkeypatch.setattr(rounded_gaussian, "BITS", 4)
    grid_of.cache_clear()
    try:
        p, n = plan(), 10_000
        x = value_of(gate(p).release(1, zeros(p, n))).numpy()
        spacing = grid_of(p.noise_multiplier, p.clip_norm, n).spacing
    finally:
        grid_of.cache_clear()
    margin = 1.5 * (0.4 + spacing * 100)
    assert margin > 5 * 1.5 * 0.4
    assert np.std(x) == pytest.approx(margin / 17.5, rel=0.05)


@pytest.mark.parametrize("clip_norm", [0.4, math.inf])
def test_without_noise_the_release_is_exact_and_charged(gate, clip_norm):
    total = torch.tensor([1.0, -2.5, 1e300, 0.0, 1e-300], dtype=torch.float64)
    p = make_plan(users=70, rounds=4, delta=1e-5, epsilon=math.inf, clip_norm=clip_norm)
    g = gate(p)
    released = value_of(g.release(1, BoundedSum(total.clone(), clip_norm)))
    assert torch.equal(released, total / 17.5)
    with pytest.raises(DprlhfError, match="charged before"):
        g.release(1, BoundedSum(total.clone(), clip_norm))
    g.ledger.close()
    again = Gate(p, Ledger(g.ledger.path, p.terms()), KEY)
    again.release(2, BoundedSum(total.clone(), clip_norm))
    assert again.ledger.charged == {1, 2}


def test_every_round_is_charged_the_first_and_the_last(gate: Callable[..., Gate]) -> None:
    g = gate()
    for t in range(1, g.plan.rounds + 1):
        g.release(t, zeros(g.plan))
        charged = [e.body["round"] for e in read_ledger(g.ledger.path) if e.kind == "charge"]
        assert charged == list(range(1, t + 1))
