"""Ctrl-C before the charge stops at once; from the charge on it waits for the checkpoint."""

# ruff: noqa: PT012 - what happens inside the block is what is tested

import signal
import threading
from collections.abc import Iterator

import pytest

from dprlhf.training.rounds import Interruptible

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    try:
        assert {number: signal.getsignal(number) for number in SIGNALS} == before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_charge_it_stops_at_the_next_tick(number: signal.Signals) -> None:
    done: list[str] = []
    ticked: list[int] = []
    with pytest.raises(KeyboardInterrupt), Interruptible() as interrupt:
        tick = interrupt.checked(ticked.append)
        tick(1)
        signal.raise_signal(number)
        done.append("the line after the signal")  # nothing is torn
        tick(2)
        done.append("after the tick")
    assert done == ["the line after the signal"]
    assert ticked == [1, 2]


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_charge_it_stops_at_the_charge_at_the_latest(number: signal.Signals) -> None:
    charged: list[int] = []
    with pytest.raises(KeyboardInterrupt), Interruptible() as interrupt:
        signal.raise_signal(number)
        interrupt.defer()
        charged.append(1)
    assert not charged


@pytest.mark.parametrize("number", SIGNALS)
def test_after_the_charge_it_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), Interruptible() as interrupt:
        tick = interrupt.checked(lambda rows: done.append(f"tick {rows}"))
        interrupt.defer()
        done.append("charge")
        signal.raise_signal(number)
        signal.raise_signal(number)  # impatience changes nothing
        tick(1)
        done.append("save")
        interrupt.defer()  # the round releases once more
        done.append("second charge")
    assert done == ["charge", "tick 1", "save", "second charge"]


def test_an_error_is_not_replaced_by_the_interrupt() -> None:
    with pytest.raises(ValueError, match="mine"), Interruptible() as interrupt:
        interrupt.defer()
        signal.raise_signal(signal.SIGINT)
        raise ValueError("mine")


def test_an_interrupt_of_one_round_is_not_carried_into_the_next() -> None:
    with pytest.raises(KeyboardInterrupt), Interruptible():
        signal.raise_signal(signal.SIGINT)
    with Interruptible() as interrupt:
        interrupt.defer()


def test_outside_the_main_thread_it_installs_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with Interruptible() as interrupt:
            interrupt.defer()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
