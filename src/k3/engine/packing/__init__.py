"""Writing and checking a packed trunk."""
