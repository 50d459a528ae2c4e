"""Who may speak, and how that is proved: keys, join tokens, CURVE."""
