"""The pure sides of a worker and an operator: what to say, never how it travels."""
