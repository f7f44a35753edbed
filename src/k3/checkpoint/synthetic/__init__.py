"""Synthetic checkpoints in the released format."""
