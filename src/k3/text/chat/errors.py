"""What is wrong with a conversation, and where."""

from __future__ import annotations

from k3.errors import UsageError


class ConversationError(UsageError):
    """A conversation, or a setting of one, that can't be rendered.

    Attributes:
        field: the place, such as `messages[2].content[0].type`.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
