"""The packed trunk on disk: its format, and what ties it to its checkpoint."""
