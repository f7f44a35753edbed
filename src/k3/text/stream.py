"""Streamed decoding: the text that each new token completes."""

from __future__ import annotations

import codecs

from k3.text.tokenizer import Tokenizer


class TextStream:
    """Turns the tokens of one sequence into text as they come.

    A character whose bytes are spread over several tokens comes with the last of them. Bytes that can no
    longer become a character come as U+FFFD at once. All that was returned, joined, is what
    `Tokenizer.decode` gives for all the ids. A control token comes as its spelling; a caller that doesn't
    want one in the text (a stop id) doesn't push it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished.

        Raises:
            UsageError: the id is not in the vocabulary; the stream is as it was.
        """
        text = self._decoder.decode(self._tokenizer.token_bytes(token))
        unfinished, _ = self._decoder.getstate()
        # Python's decoder waits for the end of an encoded surrogate, though no character begins like that.
        if len(unfinished) == 2 and unfinished[0] == 0xED and unfinished[1] >= 0xA0:
            text += self.flush()
        return text

    def flush(self) -> str:
        """End the sequence: U+FFFD if a character is unfinished, else nothing. A new sequence may follow."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
