"""The one exception type that users see, and how its line is worded."""

import difflib
from collections.abc import Iterable

EXITS = (KeyboardInterrupt, SystemExit)
"""The exceptions that end a program on purpose. Any other may come from a user's data, also one
that is no ``Exception``: code compiled from Rust, such as ``tokenizers``, raises such panics."""


class DprlhfError(Exception):
    """A problem that the user can mend: one line that names the offender and what to do.

    The command line prints the message without a traceback and exits with status 2. The message
    is shown outside ``secret/``, so it must never quote a private prompt, response or reward.
    """


class InterruptedRunError(KeyboardInterrupt):
    """Ctrl-C at a safe point of a run; the message says how to continue."""


def one_line(text: object, limit: int | None = 300) -> str:
    """Return an error's message, or a text, on one line, cut to ``limit`` characters."""
    return " ".join(str(text).split())[:limit]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most like ``name``; None if none reaches ``cutoff``, in [0, 1]."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)
