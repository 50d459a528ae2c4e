"""`downpour serve`: the options of the training service, and its start."""

import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.connection import DEFAULT_PORT, require_service
from deploy.cli.train import declare
from ps.transport.addresses import LAST_PORT

DEFAULT_SLOTS = max(8, os.cpu_count() or 1)


def serve(**options: Any) -> None:
    """Run the training service: a REST interface, a page in the browser, a queue of jobs.

    Jobs, logs and the database are in the folder DOWNPOUR_HOME, default ~/.downpour. Stopping the
    service stops no job. Addresses other than loopback need TLS, and each request a token.
    Without --traces-to, the variable OTEL_EXPORTER_OTLP_ENDPOINT names the collector.
    """
    with require_service():
        from deploy.service import server
        from deploy.service.access import exposure_of
        from deploy.service.app import ServeOptions
        from deploy.service.kubernetes_launcher import launcher_of
        from deploy.service.retention import ServiceLimits
        from deploy.service.traces import traces_to
        from deploy.service.webhooks import Hosts
    host, certificate = options["host"], options["tls_cert"]
    experiments, traces = options["experiments"], options["traces_to"]
    listen = server.Listen(
        host=host, port=options["port"], certificate=certificate, key=options["tls_key"]
    )
    choice = ServeOptions(
        home=server.home(),
        slots=options["slots"] or DEFAULT_SLOTS,
        roots=tuple(options["root"] or ()),
        retry_s=options["retry_s"],
        exposure=exposure_of(
            host,
            tls=certificate is not None,
            proxy=options["behind_proxy"],
            require_tokens=options["require_tokens"],
        ),
        experiments=experiments.absolute() if experiments is not None else None,
        limits=ServiceLimits.of_words(options["limit"] or ()),
        webhook_hosts=Hosts(tuple(options["webhook_host"] or ())),
        database=options["database"],
        traces=traces_to(traces) if traces is not None else None,
        launcher=launcher_of(options["launcher"]),
    )
    server.serve(choice, listen, typer.echo)


def _option(name: str, kind: Any, default: Any, text: str, **more: Any) -> inspect.Parameter:
    option = typer.Option(help=text, **more)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option])


declare(
    serve,
    [
        _option("port", int, DEFAULT_PORT, "The port to listen on.", min=1, max=LAST_PORT),
        _option("host", str, "127.0.0.1", "The address to listen on."),
        _option(
            "slots", int | None, None,
            "Workers of all running jobs together; other jobs wait in the queue.",
            min=1, max=1 << 20, show_default="8, or the number of cores if that is more",
        ),
        _option(
            "root", list[Path] | None, None,
            "A folder below which jobs may name files. Repeatable.", show_default="any",
        ),
        _option(
            "retry_s", float, 5.0, "Seconds before the first retry; doubled for each further one.",
            min=0.1, max=300.0,
        ),
        _option(
            "experiments", Path | None, None, "The folder with the folders of `downpour exp`.",
            show_default="experiments in the home",
        ),
        _option(
            "limit", list[str] | None, None,
            "A limit: free-mb=512, upload-gb=20, silent-s=30; and what `service gc` keeps:"
            " updates-days=30, logs-days=90, snapshots=3, uploads-days=30. Repeatable.",
            show_default=False,
        ),
        _option(
            "webhook_host", list[str] | None, None,
            "A host that webhooks may name, or *.DOMAIN; private:HOST if its address need not be"
            " public. Repeatable.", show_default="none",
        ),
        _option(
            "tls_cert", Path | None, None, "A certificate and its chain, in PEM.",
            show_default="none",
        ),
        _option(
            "tls_key", Path | None, None, "The certificate's key, in PEM.", show_default="none"
        ),
        _option(
            "behind_proxy", str | None, None,
            "The https:// URL of a proxy that ends TLS; only it may reach --host and --port.",
            show_default="none",
        ),
        inspect.Parameter(
            "require_tokens", inspect.Parameter.KEYWORD_ONLY, default=False,
            annotation=Annotated[
                bool, typer.Option("--require-tokens", help="Ask for a token on loopback, too.")
            ],
        ),
        _option(
            "database", str | None, None,
            "The database: sqlite, or a URL such as postgresql://me@db/jobs. One with a password is"
            " named by the variable DOWNPOUR_DATABASE.",
            show_default="the last one of this home, at first sqlite",
        ),
        _option(
            "launcher", str, "local",
            "What runs jobs: local processes, or kubernetes:FILE, Jobs made from this template.",
        ),
        _option(
            "traces_to", str | None, None,
            "An OpenTelemetry collector, by OTLP over HTTP, such as http://127.0.0.1:4318.",
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT", show_envvar=False, show_default="none",
        ),
    ],
)  # fmt: skip
