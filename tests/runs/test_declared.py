"""Models that another program trained privately: their cost is counted, never forgotten."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from torch.utils.data import DataLoader, TensorDataset

import dprlhf
from dprlhf.errors import DprlhfError
from dprlhf.privacy.accounting import Mechanism, epsilon
from dprlhf.privacy.gaussian import gaussian_epsilon
from dprlhf.runs.declared import _mechanism, declare
from dprlhf.runs.earlier import records_of, total_of_runs
from helpers import tiny
from helpers.runs import run_settings

DELTA = 1e-5


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Opacus, about its random numbers and hooks
def test_the_history_of_a_training_run_of_opacus(model: Path) -> None:
    from opacus import PrivacyEngine

    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(60, 3), torch.randn(60, 1))
    net = torch.nn.Linear(3, 1)
    engine = PrivacyEngine(accountant="prv")
    private, optimizer, loader = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), 0.1),
        data_loader=DataLoader(rows, batch_size=6), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            (private(x) - y).square().mean().backward()
            optimizer.step()
    assert engine.accountant.history == [(1.0, 0.1, 30)]
    cost = declare(model, engine.accountant.history, delta=DELTA)
    assert cost.epsilon == pytest.approx(engine.get_epsilon(DELTA), rel=0.02)
    (record,) = records_of(model)
    assert record.mechanism["rate"] == 0.1
    assert (record.stage, record.unit) == ("opacus", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "history",
    [[(1.0, 0.0001, 100)], [(1.0, 0.013, 1)] * 3, [(1.0, 0.31, 5), (2.0, 0.02, 1), (1.0, 0.31, 2)]],
    ids=["less than one pass", "one step a part", "mixed"],
)
def test_a_sampling_rate_counts_as_it_is(model: Path, history: Any) -> None:
    """The joint privacy loss distribution of another library says the same of all parts."""
    accountant = PLDAccountant()
    for noise, rate, steps in history:
        sampled = PoissonSampledDpEvent(rate, GaussianDpEvent(noise))
        accountant.compose(SelfComposedDpEvent(sampled, steps))
    true = accountant.get_epsilon(DELTA)
    found = declare(model, history, delta=DELTA).epsilon
    assert true * (1 - 2e-3) - 1e-4 <= found <= true * 1.005 + 1e-4
    assert len(records_of(model)) == len({part[:2] for part in history})


@pytest.mark.parametrize("rate", [5e-324, 1e-12, 1 / 3, 0.9999999999999999, 1.0])
def test_a_rate_is_never_below_what_was_declared(rate: float) -> None:
    mechanism = _mechanism(1.0, rate, 7, "poisson")
    assert mechanism.rate is not None
    assert rate <= mechanism.rate <= max(rate, 1e-9)
    assert epsilon(mechanism, 1e-3).epsilon <= gaussian_epsilon(1 / 7**0.5, 1e-3)
    for wrong in ({"partition": "fixed", "participations": 1}, {"rate": 1.5}, {"rate": 0.0}):
        with pytest.raises(DprlhfError, match="partition poisson"):
            Mechanism(**{**vars(mechanism), **wrong})


def test_shuffled_batches_get_no_amplification(model: Path) -> None:
    cost = declare(model, [(2.0, 0.1, 40)], delta=DELTA, sampling="shuffled")
    assert cost.epsilon == pytest.approx(gaussian_epsilon(2.0 / 4**0.5, DELTA), rel=1e-9)
    assert _mechanism(2.0, 5e-324, 40, "shuffled").releases_per_round == 1


@pytest.mark.slow
def test_a_run_that_starts_from_the_model_counts_it(model: Path, tmp_path: Path) -> None:
    parts = [(2.0, 0.2, 10), (4.0, 0.2, 10)]
    cost = declare(model, parts, delta=DELTA, sampling="shuffled")
    settings: dict[str, Any] = run_settings(str(model), rounds=1)
    with pytest.raises(DprlhfError, match="name that run"):
        dprlhf.train(**settings, output_dir=tmp_path / "refused")
    dprlhf.train(**settings, previous=[{"run": str(model)}], output_dir=tmp_path / "run")
    card = json.loads((tmp_path / "run/privacy.json").read_text())
    assert card["total"]["epsilon"] > max(cost.epsilon, card["epsilon"])
    assert card["total"]["epsilon"] < cost.epsilon + card["epsilon"]
    records, whole = total_of_runs([tmp_path / "run"])
    assert [record.stage for record in records] == ["opacus", "opacus", "rl"]
    assert whole.epsilon == pytest.approx(card["total"]["epsilon"])
    column = [{"prompt": f"user {i} says", "user": str(i)} for i in range(40)]
    with pytest.raises(DprlhfError, match="so there is no one statement"):  # rows, not people
        dprlhf.train(
            **{**settings, "prompts": column, "data__user_column": "user"},
            previous=[{"run": str(model)}],
            output_dir=tmp_path / "people",
        )


def test_no_file_of_the_model_is_half_written(model: Path) -> None:
    before = (model / "config.json").read_bytes()
    (model / "config.json.tmp").mkdir()  # where the new content would go
    with pytest.raises(DprlhfError, match=r"config\.json: could not be written"):
        declare(model, [(1.0, 0.1, 10)], delta=DELTA)
    assert (model / "config.json").read_bytes() == before


def test_an_unknown_sampling_has_no_epsilon(model: Path) -> None:
    """Taken for batches of one pass each, it would count fewer passes than they make."""
    with pytest.raises(DprlhfError, match="poisson or shuffled, not 'shuffle'"):
        declare(model, [(1.0, 0.51, 100)], delta=DELTA, sampling="shuffle")  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "batch", "passes"), [(100, 30, 10), (199, 100, 100)])
def test_passes_that_drop_their_last_batch_count_in_full(tmp_path, rows, batch, passes):
    steps = passes * (rows // batch)
    one = tmp_path / "one"
    one.mkdir()
    (one / "config.json").write_text("{}")
    cost = declare(one, [(2.0, batch / rows, steps)], delta=DELTA, sampling="shuffled")
    assert cost.epsilon >= gaussian_epsilon(2.0 / passes**0.5, DELTA)
