"""A judge on another machine as a reward: one HTTP request for each completion.

**Prompts and responses leave this machine.** The guarantee covers what the run writes; it says
nothing about what the judge's operator sees, logs or keeps.

No user's score may depend on the others, whatever fails. So a request holds one row; it is tried
again by itself, with fixed waits; and a row whose tries are used up is answered with ``None``,
which leaves it out. There is no batch of several rows, no shared budget of tries, and no switch
that gives up after so many failures: each would let one user's rows decide about another's. Nor is
there an exception: a run that stopped would say that a private row had failed. A run whose judge is
gone stops by the noised count of valid rewards alone (``privacy.reward_share``).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dprlhf.errors import extra

with extra("judge", "a judge on another machine"):
    import urllib3
    from urllib3.exceptions import HTTPError, LocationValueError

_NOT_FOR_THE_JUDGE = ("completion_ids", "trainer_state", "log_metric", "log_extra")
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses that may be gone at the next try."""
_LONGEST = 2**24
"""Most bytes of an answer."""
_PIECE = 2**16
"""Bytes of an answer that are read at a time."""


class _RefusedError(Exception):
    """The judge's answer is none; the text is the problem that is shown."""

    def __init__(self, problem: str, *, passing: bool) -> None:
        super().__init__(problem)
        self.passing = passing


class RemoteJudge:
    """Ask a judge behind HTTP for each completion's score, and leave out rows that it fails on.

    It is a reward: ``reward=RemoteJudge("http://127.0.0.1:8000/score")``, or assigned to a name in
    a file that the recipe names. The judge must answer the same for the same text: temperature 0.

    Args:
        url: Address, to which each row is posted as JSON. Redirections are not followed.
        body: Returns the JSON object to post, from the keywords ``prompt``, ``completion`` and the
            row's columns; by default the prompt and the completion under these names.
        score: Returns the score from the answer's JSON; by default its ``"score"``.
        headers: HTTP headers, such as the judge's key.
        timeout: Seconds of each try: to connect, until the answer goes on, and for all of it. A
            judge that keeps the connection alive by sending a little at a time is given up within
            twice that. Choose it well above the longest answer under load: requests that time out
            because the judge is busy with other users' rows are the one way in which these could
            still matter.
        retries: Number of further tries after connections that fail, time-outs, and the statuses
            408, 425, 429, 500, 502, 503 and 504. The waits before them are 0, 2, 4, 8, … times
            ``wait``.
        wait: Seconds.
        at_once: Number of requests that are under way at a time, and of rows in a call, so that the
            check before a run does not ask for many.

    Attributes:
        problem: The type of the last failure, such as ``HTTP status 401``; never a text from the
            row or the answer. The check on public prompts shows it, if it comes from the check.
    """

    def __init__(
        self,
        url: str,
        *,
        body: Callable[..., Mapping[str, Any]] | None = None,
        score: Callable[[Any], Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        retries: int = 4,
        wait: float = 1.0,
        at_once: int = 8,
    ) -> None:
        self.url = url
        self.problem = ""
        self.__name__ = url.partition("?")[0]
        self._body = body or _prompt_and_completion
        self._score = score or _score_of
        self._headers = dict(headers or {})
        self.dprlhf_most_rows = at_once
        self._at_once = at_once
        self._retries = retries
        self._wait = wait
        self._timeout = timeout
        self._pool = urllib3.PoolManager(
            maxsize=at_once, block=True, timeout=urllib3.Timeout(connect=timeout, read=timeout)
        )

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return the scores of completions, ``[rows]``; None where the judge gave none."""
        names = [name for name in columns if name not in _NOT_FOR_THE_JUDGE]
        rows = [
            {name: columns[name][i] for name in names} | {"prompt": prompt, "completion": text}
            for i, (prompt, text) in enumerate(zip(prompts, completions, strict=True))
        ]
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(self._at_once) as threads:
            asked = [loop.run_in_executor(threads, self._ask, row) for row in rows]
            return await asyncio.gather(*asked)

    def _ask(self, row: dict[str, Any]) -> float | None:
        """Return the score of one row; None if its tries are used up or its answer has none."""
        try:
            found = float(self._score(json.loads(self._answer(self._body(**row)))))
        except _RefusedError as problem:
            self.problem = str(problem)
            return None
        except Exception as problem:  # of the connection, or of the two functions on this row
            self.problem = type(problem).__name__
            return None
        if not math.isfinite(found):
            self.problem = "a score that is not finite"
            return None
        return found

    def _answer(self, body: Mapping[str, Any]) -> bytes:
        """Return the judge's answer to one row, which is tried again by itself.

        The waits are ours, not those that a busy judge asks for (``Retry-After``): they would
        follow from other users' rows.
        """
        for tried in range(self._retries):
            try:
                return self._try(body)
            except LocationValueError:  # no address: it is none at the next try either
                raise
            except HTTPError:
                pass
            except _RefusedError as problem:
                if not problem.passing:
                    raise
            if tried:
                time.sleep(self._wait * 2**tried)
        return self._try(body)

    def _try(self, body: Mapping[str, Any]) -> bytes:
        """Post one row once and return the answer.

        Raises:
            HTTPError: The connection fails, or nothing comes in time.
            _RefusedError: The status is not 200, or the answer takes too long or is too long.
        """
        end = time.monotonic() + self._timeout
        answer = self._pool.request(
            "POST", self.url, json=body, headers=self._headers,
            redirect=False, retries=False, preload_content=False,
        )  # fmt: skip
        try:
            if answer.status != 200:
                passing = answer.status in _PASSING
                raise _RefusedError(f"HTTP status {answer.status}", passing=passing)
            content = b""
            # Piece by piece: urllib3's own time-out starts again with every byte that comes.
            while piece := answer.read1(_PIECE):
                content += piece
                if len(content) > _LONGEST:
                    raise _RefusedError(f"an answer of more than {_LONGEST} bytes", passing=False)
                if time.monotonic() > end:
                    raise _RefusedError("no whole answer in time", passing=True)
            return content
        finally:
            answer.close()  # what is left of an answer must not be read as the next one
            answer.release_conn()


def _prompt_and_completion(prompt: Any, completion: Any, **_: object) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion}


def _score_of(answer: Any) -> Any:
    return answer["score"]
