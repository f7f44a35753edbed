"""Text in and out: the tokenizer, streamed decoding and stop strings."""
