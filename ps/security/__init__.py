"""Authentication and authorization: keys, join tokens, CURVE."""
