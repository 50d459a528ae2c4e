"""What a shard writes down before it answers, and how it is found again."""
