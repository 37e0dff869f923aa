"""The sections of datasets: prompts, documents and preferences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, TypeVar

from pydantic import Field, field_validator, model_validator

from dprlhf.errors import DprlhfError
from dprlhf.recipe.base import PositiveInt, Settings


def unit_of(owners: Iterable[str]) -> str | None:
    """Return the privacy unit as ledgers and budget books write it; None where it is a row."""
    unit = ",".join(named := sorted(owners))
    if len({*named}) < len(named):
        raise DprlhfError(f"user column {unit!r}: a column is named twice")
    return unit or None


class Data(Settings):
    """A prompt dataset: a hub id, a folder, a file or ``asset:…``.

    Attributes:
        path: Hub id, folder or file of the rows: ``.csv``, ``.tsv``, ``.json``, ``.jsonl``,
            ``.parquet``, or ``.txt`` with one prompt per line, where blank lines are skipped. A hub
            id may end in ``@`` and a branch, tag or commit, such as ``org/prompts@5f0e``.
        name: Name of the dataset's configuration on the hub.
        split: Split of the dataset. In a folder of files, the file's name without its suffix.
        prompt_column: Column of the prompts: text, or a list of ``{"role", "content"}`` messages.
            With ``rollout.agent.environment`` there may be no column ``prompt``: the prompt is then
            what ``reset`` returns.
        user_column: Column that identifies the user: rows with the same value belong to one user.
            Null makes every row a user of its own. A list names the columns of several owners, such
            as the two people of a conversation: the unit is then one person, and of the rows only
            those of pairs are used that share nobody (:func:`~dprlhf.data.names.matched`).
        max_prompts_per_user: Number of prompts that a user keeps: the first ones, in the order of
            the rows. Further ones are dropped.
        prompt_words: Keep only this many words from the start of a text prompt; null keeps all.
        max_prompt_tokens: Keep only this many tokens from the end of a prompt: a longer one loses
            its beginning. Without it the length of 99 of 100 public prompts is taken, but no more
            than the model's context leaves; private updates without public rows take 512 and what
            an agent's tools take.
        skip: Number of rows at the start that are left out.
        limit: Number of rows after these that are used; null uses all.
    """

    path: str
    name: str | None = None
    split: str = "train"
    prompt_column: str = "prompt"
    user_column: str | list[str] | None = None
    max_prompts_per_user: PositiveInt = 4
    prompt_words: PositiveInt | None = None
    max_prompt_tokens: PositiveInt = 64
    skip: Annotated[int, Field(ge=0)] = 0
    limit: PositiveInt | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that every row must have, without the user column."""
        return (self.prompt_column,)

    @field_validator("user_column")
    @classmethod
    def _in_one_order(cls, given: str | list[str] | None) -> str | list[str] | None:
        """Sort several columns, as it says nothing which comes first; one is no list."""
        if not isinstance(given, list):
            return given
        if not given or len(set(given)) < len(given):
            raise ValueError("give the name of a column, or a list of different ones")
        return sorted(given) if len(given) > 1 else given[0]

    @property
    def owners(self) -> list[str]:
        """The columns that name whose a row is; none where every row is a user."""
        named = self.user_column
        return [] if named is None else named if isinstance(named, list) else [named]

    @property
    def unit(self) -> str | None:
        """The privacy unit, as :func:`unit_of` writes it."""
        return unit_of(self.owners)

    @property
    def widths(self) -> tuple[int, int]:
        """The most tokens of a row before what is learnt, and of what is learnt."""
        return self.max_prompt_tokens, getattr(self, "max_completion_tokens", 0)

    @property
    def prompts_in_round(self) -> int:
        """The most prompts of a user in a round."""
        return 1 if self.user_column is None else self.max_prompts_per_user

    @property
    def kept(self) -> str:
        """What is used of each user and row, in words for the operator."""
        most, (before, after) = self.max_prompts_per_user, self.widths
        rows = "one a user" if self.user_column is None else f"at most {most} a user"
        return f"{rows}; a prompt keeps its last {before} tokens" + (
            f", a completion its first {after}" if after else ""
        )


D = TypeVar("D", bound=Data)

_START = 16  # tokens that a tokenizer or a template may open a document with


class PublicData(Settings):
    """Public rows, read as the users' are: the columns and lengths in ``data`` are theirs, too.

    Attributes:
        path: Hub id, folder or file, as in ``data``.
        name: Name of the dataset's configuration on the hub.
        split: Split of the dataset. In a folder of files, the file's name without its suffix.
    """

    path: str
    name: str | None = None
    split: str = "train"

    def like(self, data: D) -> D:
        """Return the section of these rows, each a user of its own, as a run's rows are read."""
        own = {"user_column": None, "max_prompts_per_user": 1, "skip": 0, "limit": None}
        return data.model_copy(update={**dict(self), **own})


class Documents(Data):
    """Documents for supervised fine-tuning, in TRL's formats.

    Attributes:
        completion_column: Column of the completions, text or messages, on which the loss is taken.
            Null takes the loss on the whole of ``prompt_column``, as in language modeling.
        max_completion_tokens: Keep only this many tokens from the start of a completion. Without it
            the length of 99 of 100 public ones is taken.
    """

    completion_column: str | None = "completion"
    max_completion_tokens: PositiveInt = 64

    @property
    def widths(self) -> tuple[int, int]:
        """The most tokens of a prompt, or of a whole document's start, and of what is learnt."""
        before, learnt = super().widths
        return before if self.completion_column is not None else min(_START, before), learnt

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that every row must have, without the user column."""
        return tuple(c for c in (self.prompt_column, self.completion_column) if c is not None)


class LoggedFeedback(Documents):
    """Completions that users were shown, with what each of them did, in TRL's unpaired format.

    Attributes:
        completion_column: Column of the completions that were shown, text or messages.
        label_column: Column of the feedback, true or false or a number: true is 1, false is −1. How
            it counts, ``update.baseline`` and ``update.reward_range`` say.
        logprob_column: Column of the log-probability, at most 0, of the whole completion and its
            end under the policy that wrote it. Null takes the model that the run starts from for
            that policy. A completion that is longer than ``max_completion_tokens`` is left out.
    """

    completion_column: str = "completion"
    label_column: str = "label"
    logprob_column: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that every row must have, without the user column."""
        logged = (self.logprob_column,) if self.logprob_column is not None else ()
        return self.prompt_column, self.completion_column, self.label_column, *logged


class Preferences(Data):
    """Preference pairs in the columns ``chosen`` and ``rejected``, or texts with a label.

    Attributes:
        label_column: Column of the labels of the texts in ``prompt_column``, each a number or a
            name from ``labels``; given in place of pairs.
        max_tokens: Keep only this many tokens of a text: the last ones, or with labels the first.
            Without it the length of 99 of 100 public texts is taken.
    """

    chosen_column: ClassVar[str] = "chosen"
    rejected_column: ClassVar[str] = "rejected"
    label_column: str | None = None
    max_tokens: PositiveInt = 128

    @property
    def widths(self) -> tuple[int, int]:
        """The most tokens of a text, and one for its label or score."""
        return self.max_tokens, 1

    @property
    def kept(self) -> str:
        """What is used of each user and row, in words for the operator."""
        rows = "one" if self.user_column is None else f"at most {self.max_prompts_per_user}"
        return f"{rows} a user; a text keeps {self.max_tokens} tokens"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that every row must have, without the user column."""
        if self.label_column is not None:
            return self.prompt_column, self.label_column
        return self.prompt_column, self.chosen_column, self.rejected_column


class PreferencePairs(Data):
    """Preference pairs in TRL's columns ``chosen`` and ``rejected``: text or messages.

    Attributes:
        prompt_column: Column of the prompts. Where it is ``chosen``, prompts are implicit, as in
            TRL: the prompt is what both completions begin with.
        max_completion_tokens: Keep only this many tokens from the start of a completion. Without it
            the length of 99 of 100 public ones is taken.
    """

    chosen_column: ClassVar[str] = "chosen"
    rejected_column: ClassVar[str] = "rejected"
    max_completion_tokens: PositiveInt = 64

    @property
    def implicit_prompt(self) -> bool:
        """Whether the prompt is what both completions begin with."""
        return self.prompt_column == self.chosen_column

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that every row must have, without the user column."""
        names = (self.prompt_column, self.chosen_column, self.rejected_column)
        return tuple(dict.fromkeys(names))

    @model_validator(mode="after")
    def _whole_completions(self) -> PreferencePairs:
        if self.implicit_prompt and self.prompt_words is not None:
            raise ValueError("prompt_words would cut chosen, which holds the prompt: leave it out")
        if self.prompt_column == self.rejected_column:
            raise ValueError("prompt_column: rejected holds completions; write chosen or prompt")
        return self
