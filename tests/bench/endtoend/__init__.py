"""Whole trainings by this project and by what a user would pick instead, to the same accuracy."""
