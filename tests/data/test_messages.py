"""The text of a message, however its content is written."""

from typing import Any

import pytest

from dprlhf.data.messages import last_text, text_of


def message(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


PARTS = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("one", "one"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([message("one"), message("two")], "one\ntwo"),
        ([message(PARTS)], "one\n\ntwo"),
        ([message(None), message("two")], "\ntwo"),
        # Arrow fills the keys that other rows' parts have.
        ([message([{"type": "text", "text": "one", "content": None}])], "one"),
        ([message(["one", "two"])], "one\ntwo"),
    ],
)
def test_the_text_is_that_of_the_messages_and_their_parts(value: Any, text: str) -> None:
    assert text_of(value) == text


def test_the_last_message_of_a_completion_counts() -> None:
    assert last_text("one") == "one"
    assert last_text([message("one"), message(PARTS)]) == "one\n\ntwo"
    assert last_text([message("one"), message(None)]) == ""
    assert last_text([]) == ""
