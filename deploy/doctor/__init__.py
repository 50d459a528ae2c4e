"""`downpour doctor`: measures links and recommends settings."""
