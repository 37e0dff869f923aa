"""A judge behind HTTP, which fails at random and must not couple users by it."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from dprlhf.errors import DprlhfError
from dprlhf.rewards import LoadedReward, Scorer, Scores, check_reward
from dprlhf.rewards.remote import RemoteJudge


class Judge:
    """A judge that counts letters, and fails where ``fails(text, attempt)`` says so."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.seen: list[dict[str, Any]] = []
        self.status = 503
        self.answer: Any = None
        self.alive = ""  # how it keeps a connection busy while it works on "slow", if it does
        self.signs = 0
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.seen.append({**body, "key": self.headers["Key"]})
                text = body["completion"]
                judge.asked[text] += 1
                failed = judge.fails(text, judge.asked[text])
                found = judge.answer if judge.answer is not None else {"score": len(text)}
                content = json.dumps(found).encode()
                if judge.alive and text == "slow":
                    judge.keep_alive(self, content)
                    return
                self.send_response(judge.status if failed else 200)
                self.send_header("Retry-After", "3600")
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def fails(self, text: str, attempt: int) -> bool:
        return False

    def keep_alive(self, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        """Write 100 signs of life in 5 seconds, then the answer."""
        signs, chunked = [b" "] * 100 + [content], self.alive == "chunked"
        handler.send_response(200)
        length = ("Content-Length", str(sum(map(len, signs))))
        handler.send_header(*(("Transfer-Encoding", "chunked") if chunked else length))
        handler.end_headers()
        for sign in signs:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(sign), sign) if chunked else sign)
            self.signs += 1
            time.sleep(0.05)
        handler.wfile.write(b"0\r\n\r\n" if chunked else b"")


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.server.shutdown()
    judge.server.server_close()


def score(reward: Any, texts: list[str], users: Any) -> Scores:
    rewards = [LoadedReward(reward, "judge", checked_rows=4)]
    count = len(texts)
    scorer = Scorer(rewards, 100.0)
    return scorer.score(["p"] * count, texts, [[]] * count, {"wants": [1] * count}, users,
                        private=True)  # fmt: skip


def test_each_row_is_a_request_with_what_the_body_names(judge: Judge) -> None:
    remote = RemoteJudge(
        judge.url,
        body=lambda prompt, completion, wants, **_: {"completion": completion, "w": wants},
        score=lambda answer: 2 * answer["score"],
        headers={"Key": "k"},
    )
    assert score(remote, ["a", "bb", "ccc"], [0, 0, 1]).values.tolist() == [2.0, 4.0, 6.0]
    assert sorted(judge.seen, key=lambda one: len(one["completion"])) == [
        {"completion": text, "w": 1, "key": "k"} for text in ("a", "bb", "ccc")
    ]
    plain = RemoteJudge(judge.url)
    assert check_reward(plain, ["p", "q"], ["a", "bb"], most_rows=4).scores == (1.0, 2.0)
    assert judge.seen[-1].keys() == {"prompt", "completion", "key"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_judge_keeps_nothing_of_the_users_that_it_has_scored(judge: Judge, fails: bool) -> None:
    used = RemoteJudge(judge.url, retries=1, wait=0.0)
    judge.fails = lambda text, attempt: fails  # type: ignore[method-assign]
    score(used, ["x" * 40, "y" * 50, ""], [0, 0, 1])
    judge.fails = lambda text, attempt: attempt == 1  # type: ignore[method-assign]
    for remote in (used, RemoteJudge(judge.url, retries=1, wait=0.0)):
        judge.asked.clear()
        assert score(remote, ["a", "bb"], [2, 2]).values.tolist() == [1.0, 2.0]


def test_failures_of_other_users_do_not_change_a_score(judge: Judge) -> None:
    """Three in four tries fail, by a coin of the text and the attempt alone."""

    def coin(text: str, attempt: int) -> bool:
        return hashlib.sha256(f"{text} {attempt}".encode()).digest()[0] % 4 > 0

    judge.fails = coin  # type: ignore[method-assign]
    texts = ["x" * i for i in range(1, 13)]
    users = np.repeat(np.arange(6), 2)

    def scored(rows: Any) -> Scores:
        judge.asked.clear()
        remote = RemoteJudge(judge.url, retries=2, wait=0.0)
        return score(remote, [texts[i] for i in rows], users[rows])

    everybody = scored(np.arange(12))
    for user in range(6):
        mine = np.flatnonzero(users == user)
        alone = scored(mine)
        assert alone.values.tolist() == everybody.values[mine].tolist()
        assert alone.valid.tolist() == everybody.valid[mine].tolist()
    expected = [not all(coin(text, attempt) for attempt in (1, 2, 3)) for text in texts]
    assert everybody.valid.tolist() == expected
    assert 0 < sum(expected) < 12  # some succeed, some fail after all their tries


def test_a_failure_is_tried_again_as_often_as_asked_and_no_more(judge: Judge) -> None:
    judge.fails = lambda text, attempt: attempt < 3  # type: ignore[method-assign]
    assert score(RemoteJudge(judge.url, retries=2, wait=0.0), ["aa"], [0]).valid.all()
    assert judge.asked == {"aa": 3}
    judge.asked.clear()
    remote = RemoteJudge(judge.url, retries=1, wait=0.0)
    assert score(remote, ["aa"], [0]).failures == {"None": 1}
    assert judge.asked == {"aa": 2}
    assert remote.problem == "HTTP status 503"
    for status in (401, 307):  # no passing failure; prompts are not sent elsewhere
        judge.asked.clear()
        judge.status = status
        assert not score(remote, ["aa"], [0]).valid.any()
        assert judge.asked == {"aa": 1}
        assert remote.problem == f"HTTP status {status}"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [({}, "KeyError"), ({"score": "high"}, "ValueError"), ({"score": 1e999}, "not finite")],
)
def test_an_answer_without_a_score_leaves_its_row_out(
    judge: Judge, answer: Any, problem: str
) -> None:
    judge.answer = answer
    remote = RemoteJudge(judge.url)
    assert score(remote, ["a", "b"], [0, 1]).failures == {"None": 2}
    assert problem in remote.problem


def test_the_check_says_why_a_judge_does_not_answer(judge: Judge) -> None:
    judge.fails = lambda text, attempt: True  # type: ignore[method-assign]
    judge.status = 401
    with pytest.raises(DprlhfError, match=r"so it never applies \(last problem: HTTP status 401\)"):
        check_reward(RemoteJudge(judge.url), ["p", "q"], ["a", "bb"])
    judge.asked.clear()
    judge.fails = lambda text, attempt: text == "a" and attempt > 1  # type: ignore[method-assign]
    with pytest.raises(DprlhfError, match=r"'repeat'.*None.*\(last problem: HTTP status 401\)"):
        check_reward(RemoteJudge(judge.url), ["p", "q"], ["a", "bb"])
    gone = RemoteJudge("http://127.0.0.1:9/score", retries=0, at_once=1)
    with pytest.raises(DprlhfError, match=r"last problem: NewConnectionError"):
        check_reward(gone, ["p", "q"], ["a", "bb"])


def test_a_judge_that_does_not_answer_in_time_is_given_up(judge: Judge) -> None:
    stop = threading.Event()

    def slow(text: str, attempt: int) -> bool:
        return stop.wait(5) if text == "slow" else False

    judge.fails = slow  # type: ignore[method-assign]
    remote = RemoteJudge(judge.url, retries=0, timeout=0.3)
    result = score(remote, ["slow", "a"], [0, 1])
    stop.set()
    assert result.valid.tolist() == [False, True]
    assert remote.problem == "ReadTimeoutError"


@pytest.mark.slow
@pytest.mark.parametrize("alive", ["chunked", "of a known length"])
def test_signs_of_life_do_not_prolong_a_try(judge: Judge, alive: str) -> None:
    judge.alive = alive
    remote = RemoteJudge(judge.url, retries=1, wait=0.0, timeout=0.3, at_once=1)
    assert score(remote, ["slow", "a"], [0, 1]).valid.tolist() == [False, True]
    assert judge.asked == {"slow": 2, "a": 1}
    assert judge.signs < 100  # both tries were given up before they had an answer
    assert remote.problem == "no whole answer in time"
    patient = RemoteJudge(judge.url, retries=0, timeout=30.0)
    assert score(patient, ["slow"], [0]).values.tolist() == [4.0]


def test_an_answer_without_end_is_given_up(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dprlhf.rewards.remote._LONGEST", 1000)
    remote = RemoteJudge(judge.url, at_once=1)
    judge.answer = {"score": 1, "reason": "x" * 900}
    assert score(remote, ["a", "b"], [0, 1]).values.tolist() == [1.0, 1.0]
    judge.answer = {"score": 1, "reason": "x" * 1000}
    assert not score(remote, ["a", "b"], [0, 1]).valid.any()
    assert judge.asked == {"a": 2, "b": 2}  # one that is too long is no shorter at the next try
    assert remote.problem == "an answer of more than 1000 bytes"
    judge.answer = None
    assert score(remote, ["a", "b"], [0, 1]).valid.all()  # over connections that are good


def test_a_connection_that_breaks_within_an_answer_is_tried_again(judge: Judge) -> None:
    stated = judge.server.RequestHandlerClass.send_header

    def too_long(handler: Any, name: str, value: str) -> None:
        longer = name == "Content-Length" and max(judge.asked.values()) < 3
        stated(handler, name, str(int(value) + 5) if longer else value)

    judge.server.RequestHandlerClass.send_header = too_long  # type: ignore[method-assign]
    assert score(RemoteJudge(judge.url, retries=2, wait=0.0), ["aa"], [0]).valid.all()
    assert judge.asked == {"aa": 3}


def test_a_check_does_not_tell_of_a_failure_on_a_private_row(judge: Judge) -> None:
    remote = RemoteJudge(judge.url, retries=0)
    judge.fails = lambda text, attempt: text == "private"  # type: ignore[method-assign]
    judge.status = 422
    score(remote, ["private"], [0])
    assert remote.problem == "HTTP status 422"
    calls = itertools.count()
    remote._score = lambda answer: next(calls)  # another answer each time
    with pytest.raises(DprlhfError, match="fails the check 'repeat'") as caught:
        check_reward(remote, ["p", "q"], ["a", "bb"])
    assert "problem" not in str(caught.value)


def test_a_check_asks_a_judge_little(judge: Judge) -> None:
    remote = RemoteJudge(judge.url, at_once=2)
    prompts, texts = [f"p{i}" for i in range(8)], ["x" * i for i in range(1, 9)]
    assert check_reward(remote, prompts, texts, most_rows=256).checked_rows == 2
    # Eight rows seven times, each of them alone, and two calls of two.
    assert sum(judge.asked.values()) == 8 * 7 + 8 + 4
