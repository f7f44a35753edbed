"""Kimi K3's chat format: a conversation as a prompt, and the reply's tokens as reasoning, content and calls.

`render` is the bare encoder, `conversation` the one normalisation above it, `reply` reads what comes back.
"""
