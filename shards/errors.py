"""The error tree, sorted by what the caller can do about an error.

    DownpourError
    ├── Retry             the same request may succeed later: a lost link, a shard that is starting
    ├── Resynchronise     the two sides disagree about the past: say hello again, then continue
    │   ├── Gap           a push arrived before an earlier one; names the number expected
    │   └── Moved         other shards hold the table now; names them
    └── GiveUp            repeating the request cannot help
        ├── BadMessage    bytes that are not a message of this protocol; the sender's fault
        ├── BadInput      a file, network, setting or array that the user must mend
        ├── Full          a sparse table has no room for more rows
        ├── Fenced        a newer incarnation of this worker has taken over its name
        ├── Denied        the token is not the job's
        ├── Mismatch      the two sides speak different protocols, or their messages differ
        └── WrongBuild    two processes of one job run different code

An error's text is one line: the thing, what was expected, what was found. It may quote foreign
text, so its length is bounded: `quote` shortens one quotation, and every error its whole text.
"""

_MAX_TEXT = 2000

UNDECODABLE = (ValueError, RecursionError)
"""The errors that msgspec raises for invalid bytes. Its own errors are ValueErrors, and so is the
UnicodeDecodeError that it lets through for text that is not UTF-8."""


class DownpourError(Exception):
    """Every error this project raises on purpose.

    `retryable`: the same call may succeed later. `table`, `shard` and `worker` are those that the
    error is about, None where it is about none or this is not known.
    """

    retryable: bool = False

    def __init__(self, text: object = "") -> None:
        super().__init__(_shorten(str(text)))
        self.table: str | None = None
        self.shard: int | None = None
        self.worker: str | None = None


class Retry(DownpourError):
    """A request failed that may succeed if it is repeated."""

    retryable = True


class Resynchronise(DownpourError):
    """The client must say hello again, learn what the shard has, and continue from there."""

    retryable = True


class Gap(Resynchronise):
    """A push arrived before its predecessor; `expected` is the number of the push to send next."""

    def __init__(self, text: str, expected: int) -> None:
        super().__init__(text)
        self.expected = expected


class Moved(Resynchronise):
    """The table is held by other shards; `cluster` describes them (JSON of a ps.Cluster)."""

    def __init__(self, text: str, cluster: bytes) -> None:
        super().__init__(text)
        self.cluster = cluster


class GiveUp(DownpourError):
    """Repeating the request cannot help."""


class BadMessage(GiveUp):
    """Bytes that are not a message of this protocol."""


class BadInput(GiveUp):
    """A file, network, setting or array that its owner must mend.

    `BadInput("--workers", expected="at least 1", got=0, hint="leave it out for 2")` has the text
    "--workers: expected at least 1, got 0; leave it out for 2", and its parts as fields, for
    programs. Without `expected`, `what` is the whole sentence.
    """

    def __init__(
        self, what: object, *, expected: object = None, got: object = None, hint: object = None
    ) -> None:
        parts = [
            f"{before}{part}"
            for before, part in ((": expected ", expected), (", got ", got), ("; ", hint))
            if part is not None
        ]
        super().__init__("".join((str(what), *parts)))
        self.what = str(what)
        self.expected, self.got, self.hint = (
            None if part is None else str(part) for part in (expected, got, hint)
        )

    def within(self, context: object) -> "BadInput":
        """Return this error about a part of `context`, which its text then names first."""
        error = BadInput(
            f"{context}: {self.what}", expected=self.expected, got=self.got, hint=self.hint
        )
        error.retryable = self.retryable
        return error


class NoServer(BadInput):
    """No server answers at an address: it is wrong, or the server does not run at this time."""

    retryable = True


class Full(GiveUp):
    """A sparse table has no room for more rows."""


class Fenced(GiveUp):
    """A newer incarnation of this worker has taken over its name."""


class Denied(GiveUp):
    """The job does not admit this client: its token is another job's."""


class Mismatch(GiveUp):
    """The two sides speak different protocols, or the forms of their messages differ."""


class WrongBuild(GiveUp):
    """Two processes of one job run different code."""


def _shorten(text: str) -> str:
    """Shorten a long text in the middle, because its end may say what to do."""
    surplus = len(text) - _MAX_TEXT
    if surplus <= 0:
        return text
    front, back = text[: _MAX_TEXT * 3 // 4], text[-_MAX_TEXT // 4 :]
    return f"{front}... ({surplus} characters left out) ...{back}"


def quote(value: object, limit: int = 80) -> str:
    """Foreign text as an error may quote it: one line, printable, at most about `limit` characters.

    A longer text is cut, and its length is appended.
    """
    text = value if isinstance(value, str) else repr(value)
    short = "".join(character if character.isprintable() else "?" for character in text[:limit])
    return short if len(text) <= limit else f"{short}... ({len(text)} characters)"
