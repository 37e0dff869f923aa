"""``dprlhf`` commands and other programs, each in a process that does not import torch anew.

A server imports the libraries once, without starting a thread; each program is a fork of it, with
its own arguments, environment, folder and streams, and ends as a Python program does.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the server of this process; it ends with it, when its standard input does."""
    words = [sys.executable, __file__]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def dprlhf(
    *arguments: str, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``dprlhf`` with these arguments, and return what it wrote and its exit status."""
    return _run(["dprlhf", *arguments], "", cwd, timeout, {})


def python(
    program: str | Path, *arguments: str, text: str = "", cwd: Path | None = None,
    timeout: float = 300, environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a file of Python, with ``text`` to read from its standard input.

    Its environment is that of this process with the changes of ``environment``.

    Not for programs about what is imported late, or about how Python ends.
    """
    return _run([str(program), *arguments], text, cwd, timeout, environment)


def _run(
    words: list[str], text: str, cwd: Path | None, timeout: float, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    server = _server()
    assert server.stdin
    assert server.stdout
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stdin").write_text(text)
        order = {
            "words": words, "cwd": str(cwd or Path.cwd()), "folder": folder,
            "environment": dict(os.environ) | dict(environment),
        }  # fmt: skip
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], timeout)[0]:
            server.kill()
            _server.cache_clear()
            raise subprocess.TimeoutExpired(words, timeout)
        code = int(server.stdout.readline())
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, code, out, err)


def _serve() -> None:
    # PEFT imports bitsandbytes where it is installed, and that torch's compiler, for two seconds.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import accelerate.utils  # noqa: F401
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import typer.rich_utils  # noqa: F401
    from transformers import GPT2LMHeadModel  # noqa: F401

    # What nearly every command imports when it runs, for a third of a second.
    import dprlhf.api
    import dprlhf.privacy.correlated_allocation
    import dprlhf.privacy.partitions.random_allocation  # noqa: F401
    from dprlhf.cli.app import main

    sys.path[0] = str(Path(__file__).parents[1])
    from helpers import disk

    disk.skip_fsync()
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.chdir(order["cwd"])
            os.environ.clear()
            os.environ.update(order["environment"])
            os.dup2(os.open(Path(order["folder"], "stdin"), os.O_RDONLY), 0)
            for stream, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(Path(order["folder"], name), os.O_WRONLY | os.O_CREAT), stream)
            sys.stdin = os.fdopen(0, closefd=False)
            sys.argv = order["words"]
            sys.path[0] = ""  # as under python -m
            try:
                if sys.argv[0] == "dprlhf":
                    main()
                else:
                    sys.path[0] = str(Path(sys.argv[0]).parent)
                    runpy.run_path(sys.argv[0], run_name="__main__")
                code: object = 0
            except SystemExit as end:
                code = end.code or 0
                if not isinstance(code, int):
                    print(code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
                code = 1
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            # Without taking the interpreter down, whose every page would be copied.
            os._exit(code if isinstance(code, int) else 1)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
