"""Links between workers and shards: measured, modelled and emulated, and what to set for them."""
