"""The command `downpour`: a file for each group of commands."""
