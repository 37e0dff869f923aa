"""The budget book: what each user has spent, over all runs on all machines.

A data set has a lifetime budget, every run reserves its whole planned cost before its first charge,
and a run is refused when one of its users would exceed the budget. Users are kept as keyed hashes.
The book is secret data, like ``secret/``: with its key it tells who took part in what.
"""

import os
from typing import TYPE_CHECKING, Any

from dprlhf.errors import extra

if TYPE_CHECKING:
    from dprlhf.budget.book import Book
    from dprlhf.budget.spending import BookError, BrokenOffError, Mark, Reservation, Spending

__all__ = [
    "Book",
    "BookError",
    "BrokenOffError",
    "Mark",
    "Reservation",
    "Spending",
    "book_name",
]

BOOK_VARIABLE = "DPRLHF_BOOK"


def book_name(setting: str | None) -> str | None:
    """Return the place of the book: the recipe's, else that of the environment, else None."""
    if setting == "none":
        return None
    return setting or os.environ.get(BOOK_VARIABLE) or None


def __getattr__(name: str) -> Any:
    # Loaded on first use: a run without a book needs no database.
    if name not in __all__:
        raise AttributeError(f"module 'dprlhf.budget' has no attribute {name!r}")
    if name == "Book":
        with extra("book", "a budget book"):
            from dprlhf.budget.book import Book

        return Book
    from dprlhf.budget import spending

    return getattr(spending, name)
