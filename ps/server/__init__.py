"""A shard's server: where clients arrive, and the loop between them and the shard."""
