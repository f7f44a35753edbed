"""Downloading the released checkpoint."""
