"""The one exception type that users see."""


class DprlhfError(Exception):
    """A problem that the user can mend: one line that names the offender and what to do.

    The command line prints the message without a traceback and exits with status 2. The message
    is shown outside ``secret/``, so it must never quote a private prompt, response or reward.
    """


class InterruptedRunError(KeyboardInterrupt):
    """Ctrl-C at a safe point of a run; the message says how to continue."""
