"""Segments, of which a prompt is made, and the elements that they spell.

An element is `<|open|>tag key="value"<|sep|>` … `<|close|>tag<|sep|>`. Its four marks are control tokens; tag, keys,
values and contents are text. Each segment is encoded by itself, so where the cuts lie decides the token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from k3.text.chat.errors import ConversationError
from k3.text.tokenizer import Tokenizer

OPEN, CLOSE, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
"""Ordinary text unless image prompts are given; then it stands for the next of them."""

Attribute = tuple[str, object]


class Segment(NamedTuple):
    """A piece of a prompt that is encoded by itself; only a control segment may hold control tokens."""

    text: str
    control: bool


def encode_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """The token ids of a prompt.

    Raises:
        UsageError: a text holds a lone surrogate.
    """
    return [token for text, control in segments for token in tokenizer.encode_segment(text, control)]


def escape(value: str) -> str:
    """An attribute's value as it is written; contents are never escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """What `escape` was given."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


class SegmentWriter:
    """Writes a prompt, element by element."""

    def __init__(self, image_prompts: Sequence[str] | None = None) -> None:
        """Begin a prompt; without `image_prompts` the image placeholder is text like any other."""
        self._segments: list[Segment] = []
        self._images = image_prompts
        self._images_used = 0

    @contextmanager
    def message(self, role: str, *attributes: Attribute) -> Iterator[None]:
        """A whole message around what is written meanwhile."""
        with self.element("message", ("role", role), *attributes):
            yield
        self._control(END_OF_MESSAGE)

    @contextmanager
    def element(self, tag: str, *attributes: Attribute) -> Iterator[None]:
        """An element around what is written meanwhile."""
        self.open(tag, *attributes)
        yield
        self._control(CLOSE)
        self.verbatim(tag)
        self._control(SEP)

    def open(self, tag: str, *attributes: Attribute) -> None:
        """The begin of an element."""
        self._control(OPEN)
        self.verbatim(tag)
        for key, value in attributes:
            for text in (f" {key}", '="', escape(str(value)), '"'):
                self.verbatim(text)
        self._control(SEP)

    def verbatim(self, text: str) -> None:
        """A text in which nothing has a meaning."""
        if text:
            self._segments.append(Segment(text, control=False))

    def text(self, text: str, field: str) -> None:
        """A text of the conversation; where image prompts are given, a placeholder in it is the next one."""
        pieces = [text] if self._images is None else text.split(IMAGE_PLACEHOLDER)
        for number, piece in enumerate(pieces):
            if number:
                self.image(field)
            self.verbatim(piece)

    def image(self, field: str) -> None:
        """The next image prompt.

        Raises:
            ConversationError: all of them are used.
        """
        if self._images is None:
            self._control(IMAGE_PLACEHOLDER)
            return
        if self._images_used == len(self._images):
            raise ConversationError(
                field, f"there are more image placeholders than image prompts ({len(self._images)})."
            )
        self._control(self._images[self._images_used])
        self._images_used += 1

    def finish(self) -> list[Segment]:
        """The prompt's segments, in order.

        Raises:
            ConversationError: an image prompt was not used.
        """
        if self._images is not None and self._images_used != len(self._images):
            raise ConversationError(
                "image_prompts",
                f"{len(self._images)} image prompts are given and the messages hold {self._images_used} image "
                "placeholders. Give one for each.",
            )
        return self._segments

    def _control(self, text: str) -> None:
        if text:
            self._segments.append(Segment(text, control=True))
