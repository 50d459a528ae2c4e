"""A shard's write-ahead log and autosaves, and the recovery from them."""
