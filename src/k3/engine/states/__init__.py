"""States that outlive a step: kept aside in memory, or in a file."""
