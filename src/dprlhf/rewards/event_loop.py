"""The event loop on which asynchronous rewards and tools run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Awaitable
from typing import Any


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    # One loop for the whole process, as in TRL: asynchronous clients belong to their first loop.
    # In a thread, because a notebook's thread already runs a loop.
    loop = asyncio.new_event_loop()
    # The default handler logs exceptions of forgotten tasks, with their text, at any later time.
    loop.set_exception_handler(lambda *_: None)

    def run() -> None:
        while True:  # an exit raised in a task stops run_forever; the caller still needs its answer
            with contextlib.suppress(BaseException):
                loop.run_forever()

    threading.Thread(target=run, name="dprlhf-async-rewards", daemon=True).start()
    return loop


def wait_for(answer: Awaitable[Any]) -> Any:
    """Return what an asynchronous reward or tool answers, from the event loop of all of them."""

    async def guarded() -> tuple[Any, BaseException | None]:
        try:
            return await answer, None
        except BaseException as problem:
            return None, problem

    value, problem = asyncio.run_coroutine_threadsafe(guarded(), _event_loop()).result()
    if problem is not None:
        raise problem
    return value
