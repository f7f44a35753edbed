"""Reading shard headers: strict, in columns, half a million names in a second."""
