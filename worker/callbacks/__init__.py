"""Callbacks: what a run reports while it trains, and the tools that it reports to."""
