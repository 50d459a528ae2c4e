"""The options of a command that reaches the training service: URL, token, certificates to trust."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from deploy.cli.train import declare
from ps.snapshots.private_files import check_private
from shards.errors import BadInput
from shards.extras import missing

if TYPE_CHECKING:
    from deploy.service.client import ServiceClient

DEFAULT_PORT = 8600
TOKEN_VARIABLE = "DOWNPOUR_TOKEN"


class ServiceAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a command that speaks to a service.

    The variable DOWNPOUR_TOKEN wins over `token_file`. There is no option for a token itself:
    other users of a machine see the arguments of a command.
    """

    server: str
    token_file: Path | None
    ca_file: Path | None

    @contextmanager
    def open(self) -> "Iterator[ServiceClient]":
        """The client; raises BadInput for a file that is missing or that others can read."""
        with require_service():
            from deploy.service.client import ServiceClient
        with ServiceClient(self.server, token=self.read_token(), ca_file=self.ca_file) as client:
            yield client

    def read_token(self) -> str | None:
        """The token of the variable or of the file, None without both; raises BadInput."""
        token = os.environ.get(TOKEN_VARIABLE)
        if token or self.token_file is None:
            return token
        check_private(self.token_file, "--token-file")
        text = self.token_file.read_text().strip()
        if not text:
            raise BadInput(
                f"--token-file {self.token_file}", expected="a token", got="an empty file"
            )
        return text


@contextmanager
def require_service() -> Iterator[None]:
    """Say which extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing("the service", str(error.name), "service") from None


def _parameter(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    shown = default is not None
    option = typer.Option(help=text, envvar=f"DOWNPOUR_{name.upper()}", show_default=shown)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option])


CONNECTION = (
    _parameter("server", str, f"http://127.0.0.1:{DEFAULT_PORT}", "The URL of the service."),
    _parameter(
        "token_file", Path | None, None,
        f"A file of mode 600 with the token; the variable {TOKEN_VARIABLE} may hold it, too.",
    ),
    _parameter(
        "ca_file", Path | None, None, "Certificates to trust, in PEM, in place of the system's."
    ),
)  # fmt: skip
"""The options of `ServiceAddress`, as Typer reads them."""


def add_connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the first parameter of a command, a `ServiceAddress`, by the options that make it."""

    @wraps(command)
    def run(**values: Any) -> None:
        address = {parameter.name: values.pop(parameter.name) for parameter in CONNECTION}
        command(ServiceAddress(**address), **values)

    first, *parameters = inspect.signature(command, eval_str=True).parameters.values()
    assert first.annotation is ServiceAddress
    declare(run, [*parameters, *CONNECTION])
    return run
