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
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3

_NOT_FOR_THE_JUDGE = ("completion_ids", "trainer_state", "log_metric", "log_extra")
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses that may be gone at the next try."""


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
        timeout: Seconds to wait for a connection, and for the answer, at each try. Give it well
            above the longest answer under load: requests that time out because the judge is busy
            with other users' rows are the one way in which these could still matter.
        retries: Number of further tries after connections that fail, time-outs, and the statuses
            408, 425, 429, 500, 502, 503 and 504. The waits before them are 0, 2, 4, 8, … times
            ``wait``.
        wait: Seconds.
        at_once: Number of requests that are under way at a time.

    Attributes:
        problem: The type of the last failure, such as ``HTTP status 401``; never a text from the
            row or the answer. The check on public prompts shows it.
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
        self._at_once = at_once
        self._pool = urllib3.PoolManager(
            maxsize=at_once,
            block=True,
            timeout=urllib3.Timeout(connect=timeout, read=timeout),
            retries=urllib3.Retry(
                total=retries,
                backoff_factor=wait,
                backoff_max=math.inf,
                status_forcelist=_PASSING,
                allowed_methods=None,  # a request to judge changes nothing, though it is a POST
                # The judge's own wish would follow how busy other users' rows keep it.
                respect_retry_after_header=False,
            ),
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
        try:
            answer = self._pool.request(
                "POST", self.url, json=self._body(**row), headers=self._headers, redirect=False
            )
            if answer.status != 200:
                self.problem = f"HTTP status {answer.status}"
                return None
            found = float(self._score(answer.json()))
        except Exception as problem:  # of the connection, or of the two functions on this row
            reason = getattr(problem, "reason", None)
            self.problem = type(reason if isinstance(reason, Exception) else problem).__name__
            return None
        if not math.isfinite(found):
            self.problem = "a score that is not finite"
            return None
        return found


def _prompt_and_completion(prompt: Any, completion: Any, **_: object) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion}


def _score_of(answer: Any) -> Any:
    return answer["score"]
