"""What a run will read and take before it is tried, and what this machine can do."""
