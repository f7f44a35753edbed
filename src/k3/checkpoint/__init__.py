"""What is on disk: config, shard headers, tensor index, layout. Reads headers, never weights."""
