"""A PostgreSQL server of one's own, in a temporary folder, reached through a Unix socket only."""

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def missing() -> str:
    """Return what the server lacks on this machine; empty if it can be started."""
    binaries = [name for name in ("initdb", "pg_ctl") if _find(name) is None]
    if binaries:
        return f"PostgreSQL is not installed ({', '.join(binaries)})"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed"
    if os.geteuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return ""


def _find(name: str) -> str | None:
    places = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


def _user() -> str | None:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


@contextlib.contextmanager
def server(*, durable: bool = False) -> Iterator[Callable[[], str]]:
    """Start a server, and yield a function that makes a new database and returns its URL."""
    root = os.geteuid() == 0
    user = _user() if root else None
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        data = folder / "data"
        data.mkdir(mode=0o700)
        if user:
            shutil.chown(folder, user)
            shutil.chown(data, user)

        def run(program: str, *words: str) -> None:
            options: dict[str, Any] = {}
            if user:
                options = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
            command = [_find(program) or program, "-D", str(data), *words]
            with open(folder.parent / f"{folder.name}.log", "w") as log:
                subprocess.run(command, check=True, stdout=log, stderr=log, cwd=folder, **options)

        sync = [] if durable else ["--no-sync"]
        run("initdb", "--auth=trust", "--username=dprlhf", "--encoding=UTF8", "--locale=C", *sync)
        how = f"-c listen_addresses='' -k {folder}" + ("" if durable else " -F")
        run("pg_ctl", "start", "--wait", "--silent", f"--options={how}", f"--log={folder}/log")
        try:
            yield _databases(folder)
        finally:
            run("pg_ctl", "stop", "--mode=immediate", "--silent")
            (folder.parent / f"{folder.name}.log").unlink(missing_ok=True)


def _databases(folder: Path) -> Callable[[], str]:
    import psycopg

    numbers = itertools.count()

    def new() -> str:
        name = f"book{next(numbers)}"
        with psycopg.connect(
            f"host={folder} user=dprlhf dbname=postgres", autocommit=True
        ) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
        return f"postgresql://dprlhf@/{name}?host={folder}"

    return new
