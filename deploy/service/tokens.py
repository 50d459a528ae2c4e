"""Tokens, their roles, and the principals that present them, without a clock or a database.

A token has a public id and 256 random bits. The service stores a keyed digest of those bits. A slow
hash, as for passwords, would add nothing: a password can be guessed, 256 random bits cannot.
"""

import hmac
import re
import secrets
from enum import StrEnum

import msgspec

_TOKEN = re.compile(r"dps_([0-9a-f]{12})_([0-9a-f]{64})")


class TokenRole(StrEnum):
    """The rights of a token in its projects. Each role may do what those before it may."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"
    ADMINISTRATOR = "administrator"

    def includes(self, other: "TokenRole") -> bool:
        """Return whether this role may do what `other` may."""
        ranks = list(TokenRole)
        return ranks.index(self) >= ranks.index(other)


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request. `projects` are those it may see; None: all.

    `token` is the id of its token, empty for a user of this machine; `session` the secret of its
    browser session, empty without one.
    """

    name: str
    role: TokenRole
    projects: frozenset[str] | None = None
    token: str = ""
    session: str = ""

    def sees(self, project: str) -> bool:
        """Return whether the project and its jobs exist for this sender."""
        return self.projects is None or project in self.projects


LOCAL = Principal(name="local", role=TokenRole.ADMINISTRATOR)
"""Any user of this machine, where the service asks for no token."""


def new_token() -> tuple[str, str]:
    """The id and the text of a new token."""
    number = secrets.token_hex(6)
    return number, f"dps_{number}_{secrets.token_hex(32)}"


def token_id(text: str) -> str | None:
    """The id of a token; None for a text that is no token."""
    match = _TOKEN.fullmatch(text)
    return match[1] if match is not None else None


def digest_of(secret: str) -> str:
    """The digest that is stored of a token or of a session."""
    return hmac.digest(b"downpour service", secret.encode(), "sha256").hex()


def constant_time_equal(text: str, expected: str) -> bool:
    """Return whether two texts are equal, in a time that says nothing about them."""
    return hmac.compare_digest(text.encode(), expected.encode())


def csrf_of(session: str) -> str:
    """The text that a page of this session sends with each change: other sites do not know it."""
    return hmac.digest(session.encode(), b"csrf", "sha256").hex()
