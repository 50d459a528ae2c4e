"""Numbers with the things that they count, for messages."""


def format_count(number: int, noun: str) -> str:
    """A number with its noun, such as `1 step`, `1,200 steps`, `2 entries` or `3 pushes`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"
