"""Where shards live: threads, processes or Ray actors, begun, watched and begun again."""
