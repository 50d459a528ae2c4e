"""The pure parts of a worker and of an operator: which messages to send, without any I/O."""
