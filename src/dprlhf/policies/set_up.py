"""What is saved beside a policy's weights: tokenizer and configs, as they were before the rounds.

A reward may share the program's tokenizer or model. What it leaves there on private prompts, such
as the padded length of a batch, is computed from users and has no noise.
"""

from __future__ import annotations

import copy
from typing import Any

from dprlhf.errors import DprlhfError


class SetUp:
    """Copies of tokenizer and configs from before the first round, restored before saving."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, Any, Any]] = {}

    def keep(self, owner: Any, name: str) -> None:
        """Keep a copy of an attribute until :meth:`end`."""
        held = getattr(owner, name, None)
        if held is None:
            return
        try:
            self._kept[name] = owner, held, copy.deepcopy(held)
        except Exception as problem:
            raise DprlhfError(
                f"the {name} ({type(held).__name__}) cannot be copied ({type(problem).__name__}),"
                " so what private prompts leave in it could not be kept out of the saved one"
            ) from None

    def put_back(self) -> None:
        """Put the copies back into the objects that they were taken from."""
        # In place: the program may save its own objects again, or pass them to another run.
        for name, (owner, held, kept) in self._kept.items():
            fresh = copy.deepcopy(kept)
            vars(held).clear()
            vars(held).update(vars(fresh))
            setattr(owner, name, held)

    def end(self) -> None:
        """Put the copies back for good: what the program changes from now on is its own affair."""
        self.put_back()
        self._kept.clear()
