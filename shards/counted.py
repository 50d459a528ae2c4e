"""Numbers with the things that they count, for messages."""


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 step`, `1,200 steps` or `2 entries`."""
    if number == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{number:,} {plural}"
