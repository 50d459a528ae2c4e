"""A shard's server: the sockets for clients, and the loop between them and the shard."""
