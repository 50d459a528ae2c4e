"""The CPU twin: each operation's body on NumPy arrays; its module above says what it computes."""
