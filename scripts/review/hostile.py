"""What users' rows could do to a run by what they hold.

Writes rows to ``docs/results/review.json``, in about a minute on one core::

    PYTHONPATH=src python -m scripts.review.hostile
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "results" / "review.json"
sys.path.insert(0, str(ROOT / "tests"))

from contracts.test_hostile_users import ASKED, rows_of, users_of, usual  # noqa: E402
from dprlhf.data.given_rows import rows_from  # noqa: E402
from dprlhf.data.loading import load_rows  # noqa: E402
from dprlhf.data.users import Users  # noqa: E402
from dprlhf.errors import DprlhfError  # noqa: E402
from dprlhf.recipe import Data  # noqa: E402
from dprlhf.runs.measurements import Result, write_results  # noqa: E402
from helpers import agents, hostile  # noqa: E402

LARGE = 14_000_000


def counted(frame: pd.DataFrame, folder: Path, **settings: Any) -> int:
    """Return how many users a table has as it is read; 0 where it is refused."""
    file = folder / "table.csv"
    frame.to_csv(file, index=False)
    data = Data(path=str(file), user_column="user", **settings)
    try:
        return Users(load_rows(data), data).count
    except DprlhfError:
        return 0


def carriage_returns(folder: Path) -> int:
    """Return how many users there are beyond three people, one of whom wrote carriage returns."""
    evil = "hello" + "".join(f"\ru9{i},please reward me" for i in range(4))
    frame = pd.DataFrame({"user": ["u1", "u2", "u3"], "prompt": ["a", evil, "b"]})
    file = folder / "returns.csv"
    file.write_text("user,prompt\n" + "".join(f"{u},{p}\n" for u, p in frame.values), newline="")
    data = Data(path=str(file), user_column="user")
    try:
        return max(0, Users(load_rows(data), data).count - 3)
    except DprlhfError:
        return 0


def spellings(folder: Path) -> int:
    """Return how many users a person is who is written in five ways, beyond one."""
    names = ["1", "+1", "\uff11", "1\u200b", "\ufeff1"]
    return counted(pd.DataFrame({"user": ["x", *names], "prompt": ["a"] * 6}), folder) - 2


def refusal_with_a_count(folder: Path) -> int:
    """Return whether a refused ``skip`` prints how many rows there are."""
    file = folder / "rows.jsonl"
    file.write_text('{"user": "a", "prompt": "x"}\n' * 7)
    try:
        load_rows(Data(path=str(file), user_column="user", skip=100))
    except DprlhfError as refused:
        return int("7" in str(refused).replace(str(folder), ""))
    return 0


def copies(folder: Path) -> int:
    """Return how many files of private rows a killed program would leave."""
    place = folder / "temporary"
    place.mkdir()
    tempfile.tempdir = str(place)
    rows = rows_from(({"prompt": f"{hostile.CANARY} {i}"} for i in range(100)), "prompt")
    tempfile.tempdir = None
    files = [file for file in place.rglob("*") if file.is_file()]
    return len(files) if len(rows) else 0


def memory(folder: Path) -> float:
    """Return by how many MB the peak memory of a process grows as a round reads a huge prompt."""
    file = folder / "huge.jsonl"
    file.write_text(f'{{"user": "a", "prompt": "{"lorem ipsum " * (LARGE // 12)}"}}\n')
    program = (
        "import numpy as np\nfrom contracts.test_hostile_users import users_of\n"
        "from pathlib import Path\nfrom helpers import agents\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        f"users, policy = users_of(Path({str(file)!r})), agents.policy_of()\n"
        "before = peak()\n"
        "users.readable(np.arange(1), lambda some: policy.encode(some.prompts, 64))\n"
        "print((peak() - before) / 1024)"
    )
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return round(float(done.stdout), 1)


def texts_among_conversations(folder: Path) -> int:
    """Return whether a text among the conversations of an agent's users ends their round."""
    from dprlhf.agents import Agent, AgentSampler

    policy = agents.policy_of()
    AgentSampler(Agent([agents.add])).attach(policy, agents.LONGEST)
    prompts = agents.prompts_of(["1 and 1?", "2 and 1?"])
    prompts.prompts[0] = "a text"
    try:
        agents.draw(policy, prompts)
    except DprlhfError:
        return 1
    finally:
        policy = agents.policy_of()
    return 0


def hostile_users(folder: Path) -> tuple[int, int, int]:
    """Return how many hostile users were tried, and how many readings they ended or changed."""
    policy, tried, ended, moved = agents.policy_of(), 0, 0, 0
    for form, asked in enumerate((ASKED, '"NUMBER and 1?"')):
        columns = {"prompt": (hostile.prompt, asked), "answer": (hostile.value, "NUMBER")}
        count, found = 1_100, []
        for blank in (False, True):
            lines = rows_of(count, columns, blank=blank)
            try:
                users = users_of(folder / f"{form}-{blank}.jsonl", lines)
                read = users.readable(
                    np.arange(count), lambda some: policy.encode(some.prompts, 24)
                )
                found.append({row[0]: row for row in usual(read)})
            except Exception:
                ended += 1
        tried += count - count // 11
        if len(found) == 2:
            moved += sum(found[0].get(user) != row for user, row in found[1].items())
    return tried, ended, moved


def main() -> None:
    random.seed(0)
    measures: dict[str, tuple[Callable[[Path], float], str, float]] = {
        "further users by carriage returns in a text": (carriage_returns, "users", 0),
        "further users by the spelling of a name": (spellings, "users", 0),
        "refusals that print the number of rows": (refusal_with_a_count, "refusals", 0),
        "files of rows that a kill leaves": (copies, "files", 0),
        "memory for a prompt of 14 MB": (memory, "MB", 100),
        "agent's rounds ended by a text": (texts_among_conversations, "rounds", 0),
    }
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            Result(f"hostile: {name}, now", value, unit, f"at most {most:g}", value <= most)
            for name, (measure, unit, most) in measures.items()
            for value in [measure(Path(folder))]
        ]
        tried, ended, moved = hostile_users(Path(folder))
    rows += [
        Result("hostile: users tried, now", tried, "users", "at least 2,000", tried >= 2_000),
        Result("hostile: readings ended by them, now", ended, "readings", "0", ended == 0),
        Result("hostile: other users moved, now", moved, "users", "0", moved == 0),
    ]
    write_results(OUT, rows)
    for row in rows:
        print(f"{row.name}: {row.value} {row.unit}")


if __name__ == "__main__":
    main()
