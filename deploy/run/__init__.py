"""One training run: its settings, its folder, its figures and its pictures."""
