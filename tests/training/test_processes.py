"""Several processes are one: same sums, one noise, one ledger, and no harm when one dies."""

import itertools
import json
import os
import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch import distributed

from dprlhf import DprlhfError
from dprlhf.budget import Book
from dprlhf.privacy.ledger import read_ledger
from dprlhf.training import processes
from dprlhf.training.processes import Processes
from helpers import commands, launched

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 64])
def test_a_sum_takes_few_messages_of_each_process(count, monkeypatch):
    """Each process of the tree is a thread; messages go through queues and are counted."""
    rank, sent = threading.local(), dict.fromkeys(range(count), 0)
    boxes = {
        pair: queue.Queue[torch.Tensor]() for pair in itertools.product(range(count), repeat=2)
    }

    def send(values: torch.Tensor, to: int) -> None:
        sent[rank.own] += 1
        boxes[rank.own, to].put(values.clone())

    def recv(values: torch.Tensor, source: int) -> None:
        values.copy_(boxes[source, rank.own].get(timeout=60))

    monkeypatch.setattr(distributed, "get_rank", lambda: rank.own)
    monkeypatch.setattr(distributed, "get_world_size", lambda: count)
    monkeypatch.setattr(distributed, "send", send)
    monkeypatch.setattr(distributed, "recv", recv)
    monkeypatch.setattr(distributed, "broadcast", lambda values, source: None)
    own = torch.randint(-(2**40), 2**40, (count, 7), generator=torch.Generator().manual_seed(count))
    found: dict[int, torch.Tensor] = {}

    def act(number: int) -> None:
        rank.own = number
        found[number] = processes._tree_sum(own[number].double())

    threads = [threading.Thread(target=act, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0], own.sum(0).double())
    assert sent == {number: int(number > 0) for number in range(count)}


SEVERAL = ["run-3", "sharded-2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All launches, made once, also where pytest-xdist spreads the tests of this file."""
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "launches"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            made.mkdir()
            done = commands.python(launched.__file__, str(made), timeout=400)
            assert done.returncode == 0, done.stderr[-3000:]
    return made


def codes(folder: Path, run: str) -> list[int]:
    return [int(code) for code in (folder / f"{run}-codes").read_text().split()]


def seen(folder: Path, run: str) -> list[launched.Seen]:
    """Return what each process of a launch saw."""
    assert set(codes(folder, run)) == {0}, (folder / f"{run}-output-0").read_text()[-3000:]
    return [
        launched.Seen(**torch.load(folder / f"{run}-seen-{rank}.pt"))
        for rank in range(len(codes(folder, run)))
    ]


def charges(folder: Path, kind: str = "charge") -> list[int]:
    return [e.body["round"] for e in read_ledger(folder / "ledger.jsonl") if e.kind == kind]


@pytest.mark.parametrize("run", SEVERAL)
def test_sums_and_parameters_equal_those_of_one_process(folder: Path, run: str) -> None:
    one = seen(folder, "run-1")[0]
    assert len(one.sums) == launched.ROUNDS
    assert all(float(total.norm()) > 1e-3 for total in one.sums)
    for process in seen(folder, run):
        assert process.processes == int(run[-1])
        for found, expected in zip(process.sums, one.sums, strict=True):
            assert float((found - expected).norm()) <= 1e-9 * float(expected.norm())
        for found, expected in zip(process.parameters, one.parameters, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("run", SEVERAL)
def test_the_evaluation_of_several_processes_is_that_of_one(folder: Path, run: str) -> None:
    seen(folder, run)
    one, several = (
        json.loads((folder / name / "samples.json").read_text()) for name in ("run-1", run)
    )
    assert len(one) == launched.EVALUATED
    assert several == one
    one, several = (
        json.loads((folder / name / "evaluation.json").read_text()) for name in ("run-1", run)
    )
    assert one["after"]["kl"]["mean"] != 0
    for when in ("before", "after"):
        for name, figures in one[when].items():
            assert several[when][name] == pytest.approx(figures, abs=1e-9, nan_ok=True)


def test_the_subspace_of_two_processes_is_that_of_one(folder: Path) -> None:
    one, two = seen(folder, "guided-1")[0], seen(folder, "guided-2")
    # Of the public prompts the gradients of the reward and of the likelihood, then of the users.
    gradients, likelihood, sums = (one.sums[i::3] for i in range(3))
    assert [g.ndim for g in (*gradients, *likelihood)] == [2] * 2 * launched.ROUNDS
    assert [len(s) for s in sums] == [3 + 2] * launched.ROUNDS  # directions and telemetry
    for process in two:
        for found, expected in zip(process.sums, one.sums, strict=True):
            assert float((found - expected).norm()) <= 1e-7 * float(expected.norm())
        for found, expected in zip(process.parameters, one.parameters, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)
    assert two[0].released == two[1].released


def test_every_process_tells_its_callbacks_the_same(folder: Path) -> None:
    """Or one that stops on an evaluation would leave the others waiting for its process."""
    main, other = seen(folder, "guided-2")
    assert ["public_reward" in metrics for metrics in main.told] == [False, True, False]
    assert other.told == main.told


@pytest.mark.parametrize("run", ["run-1", *SEVERAL])
def test_noise_is_drawn_once_a_round_and_the_release_is_the_same_everywhere(folder, run):
    main, *others = seen(folder, run)
    assert main.noise == seen(folder, "run-1")[0].noise  # bitwise, whatever the number
    assert len(set(main.noise)) == launched.ROUNDS
    assert len(set(main.released)) == launched.ROUNDS
    for other in others:
        assert other.noise == []
        assert other.released == main.released
        for mine, theirs in zip(other.parameters, main.parameters, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("run", SEVERAL)
def test_users_are_shared_out_unevenly_and_one_process_writes_the_ledger(folder, run):
    everybody = seen(folder, run)
    sizes = np.array([process.shares for process in everybody])
    assert sizes.sum(0).tolist() == seen(folder, "run-1")[0].shares
    assert (sizes == 0).any() == (run == "run-3")  # a process without users in some round
    assert (sizes.min(0) < sizes.max(0)).any()
    assert [process.ledgers for process in everybody] == [1] + [0] * (len(everybody) - 1)
    ledgers = [(folder / name / "ledger.jsonl").read_bytes() for name in (run, "run-1")]
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize("run", ["reward-2", "reward-sharded-2"])
def test_a_supervised_stage_in_several_processes_equals_that_of_one(run: str, folder: Path) -> None:
    runs = ("reward-1", run)
    for name in runs:
        assert set(codes(folder, name)) == {0}, (folder / f"{name}-output-0").read_text()[-3000:]
    one, several = (load_file(folder / name / "checkpoint/policy.safetensors") for name in runs)
    assert one.keys() == several.keys()
    for name, expected in one.items():
        torch.testing.assert_close(several[name], expected, rtol=1e-5, atol=1e-8)
    ledgers = [(folder / name / "ledger.jsonl").read_bytes() for name in runs]
    assert ledgers[0] == ledgers[1]


def test_one_process_reserves_and_all_hear_of_a_refusal(folder: Path) -> None:
    assert set(codes(folder, "counted-2")) == {0}
    (row,) = Book(str(folder / "book.db")).read()["reservations"]
    assert (row["name"], row["users"]) == ("counted-2", len(launched.PROMPTS))
    assert [e.kind for e in read_ledger(folder / "counted-2/ledger.jsonl")].count("book") == 1
    assert codes(folder, "refused-2") == [2, 2]
    for rank in range(2):
        assert "refused: with this run" in (folder / f"refused-2-output-{rank}").read_text()
    assert not (folder / "refused-2").exists()


def test_processes_that_read_the_users_in_another_order_are_refused(folder: Path) -> None:
    """Each takes its share of a round by the users' numbers: one would be drawn by both."""
    assert codes(folder, "shuffled-2") == [2, 2]
    for rank in range(2):
        said = (folder / f"shuffled-2-output-{rank}").read_text()
        assert "the same in another order" in said
        assert not any(prompt in said for prompt in launched.PROMPTS)
    assert not (folder / "shuffled-2").exists()


def test_a_sharded_process_holds_half_of_the_frozen_layers(folder: Path) -> None:
    whole = seen(folder, "run-1")[0].weights_held
    base = launched.tiny.model()
    layers = sum(p.numel() for p in base.transformer.h.parameters())
    for process in seen(folder, "sharded-2"):
        assert process.weights_held == whole - layers // 2


def test_every_user_is_on_one_process() -> None:
    for count in (1, 2, 3, 5):
        for users in (np.arange(0), np.arange(4), np.array([7, 3, 9, 1, 5, 0, 2])):
            shares = [
                Processes(SimpleNamespace(process_index=i, num_processes=count)).share(users)
                for i in range(count)
            ]
            assert sorted(np.concatenate(shares)) == sorted(users)
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("run", "killed", "committed"), [("worker-killed", 1, [1, 2, 3]), ("main-killed", 0, [1, 3])]
)
def test_a_killed_process_stops_the_others_and_no_charge_is_lost_or_doubled(
    folder: Path, run: str, killed: int, committed: list[int]
) -> None:
    for rank, code in enumerate(codes(folder, run)):
        if rank == killed:
            assert code == -9
            continue
        assert code == 2
        shown = (folder / f"{run}-output-{rank}").read_text()
        said = f"process {rank} of {len(codes(folder, run))}: another process stopped"
        assert shown.count(said) == 1
        assert "Traceback" not in shown
    assert codes(folder, f"{run}-resumed") == [0]
    # The main process died after it had charged round 2: spent, and never drawn again.
    assert charges(folder / run) == [1, 2, 3]
    assert charges(folder / run, "commit") == committed
    if run == "worker-killed":  # nothing was charged for round 2: the run is the unbroken one
        found = load_file(folder / run / "checkpoint/policy.safetensors")
        expected = load_file(folder / "run-1/checkpoint/policy.safetensors")
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "MASTER_PORT": "1"}, None),
        ({"PMI_SIZE": "1"}, None),
        ({"WORLD_SIZE": "1", "PMI_SIZE": "2"}, None),  # srun starts one torchrun a machine
        ({"MASTER_PORT": "1"}, None),  # left over from another tool
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE asks for 4 processes, but this launch has 1"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE asks for 2 processes"),
    ],
    ids=str,
)
def test_the_number_of_processes_is_the_number_asked_for(monkeypatch, variables, message):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "MASTER_", "WORLD_", "PMI_", "OMPI_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if message is None:
        processes._check_count(1)
    else:
        with pytest.raises(DprlhfError, match=message):
            processes._check_count(1)
