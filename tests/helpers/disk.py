"""Files that must outlive their process, not the machine."""

import os


def skip_fsync() -> None:
    """Let ``os.fsync`` of this process, and of its forks, wait for no disk: a third of a short run.

    What a process has written is there after it was killed, too; fsync is for a machine without
    power, which no test brings about. Those that count the calls put their own in its place. A file
    that is closed still raises ``OSError``.
    """
    os.fsync = os.fstat
