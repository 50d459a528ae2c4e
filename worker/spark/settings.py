"""Spark's settings at start, and the parsing of Spark URLs: plain values; imports no Spark.

The embedded session is for one machine: quick to start, quiet, on loopback only, with all its files
in one folder that is removed with it. A cluster keeps its own settings, except those that a worker
cannot do without.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree as ET

from ps.transport.addresses import LAST_PORT, on_this_host
from shards.errors import BadInput
from worker.spark.daemon import PRELOADED

# A worker uses one BLAS thread: threads of several workers on one core only slow each other down.
# A worker sets the limit again when it starts, because Spark Connect cannot pass these variables.
ONE_THREAD = {
    f"{library}_NUM_THREADS": "1"
    for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM", "NUMBA")
}
# A killed Python worker is a failed attempt of its task; local[N] would fail the whole job on it.
_ATTEMPTS = 4
_HADOOP, _MANAGER = ("YARN_CONF_DIR", "HADOOP_CONF_DIR"), "yarn.resourcemanager"
START_S = 60.0
"""The usual limit, in seconds, on each stage of a start of a cluster's Spark."""
GUARDS = ("spark.authenticate", "spark.network.crypto.enabled")
SUBMISSION_PORT = "spark.master.rest.port"
"""The setting of a standalone master's port for programs that are submitted over HTTP."""
_USUAL_SUBMISSION_PORT = "6066"
SUBMITTED = "submitted"
"""The URL of the Spark that runs this program through spark-submit."""
_DEFAULT_PORTS = {"https": 443, "http": 80, "sc": 15002}
_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.target = SYSTEM_ERR
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


def parse_local_master(url: str | None, slots: int) -> str | None:
    """The master URL of an embedded session, or None when `url` names a cluster.

    `None` and `local` mean `slots` threads; `local[N]` means N.
    """
    shape = re.fullmatch(r"local(?:\[([1-9]\d{0,4}|\*)(?:,\s*([1-9]\d{0,4}))?\])?", url or "local")
    if not shape:
        return None
    return f"local[{shape[1] or slots},{shape[2] or _ATTEMPTS}]"


def prepare_embedded_settings(master: str, app: str, slots: int, folder: Path) -> dict[str, str]:
    """The settings of an embedded session that keeps its files in `folder`, which exists."""
    log4j = folder / "log4j2.properties"
    log4j.write_text(_LOG4J)
    # C1 alone and the serial collector halve the start-up time; the arrays are Python's anyway.
    options = (
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",
        f'"-Djava.io.tmpdir={folder}"',  # a folder's name may have a space in it
        f"-Dlog4j2.configurationFile={log4j.as_uri()}",
    )
    return _everywhere(app) | {
        "spark.master": master,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": " ".join(options),
        "spark.ui.enabled": "false",
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": str(slots),
        "spark.default.parallelism": str(slots),
    }


def pythons(environ: Mapping[str, str]) -> dict[str, str]:
    """The Pythons that Spark runs, by variable: this one, unless `environ` names others."""
    names = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    return {name: environ.get(name) or sys.executable for name in names}


def build_embedded_environment(
    folder: Path, spark_home: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables of an embedded session's processes: the JVM and the Python workers it forks."""
    return (
        ONE_THREAD
        | pythons(environ)
        | {
            "SPARK_HOME": str(spark_home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(folder),
            "SPARK_LAUNCHER_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData",
        }
    )


def preload(environ: Mapping[str, str], modules: Sequence[str] = ()) -> dict[str, str]:
    """The settings by which Python workers start with what they need, and `modules`, loaded.

    They are empty if Spark runs another Python than this one, which may not have this project's
    code.
    """
    if pythons(environ)["PYSPARK_PYTHON"] != sys.executable:
        return {}
    settings = {"spark.python.daemon.module": "worker.spark.daemon"}
    if modules:
        settings[f"spark.executorEnv.{PRELOADED}"] = " ".join(modules)
    return settings


# Variables that configure a Spark other than the embedded one.
FOREIGN = ("SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT", "SPARK_DIST_CLASSPATH")


def cluster(
    master: str,
    app: str,
    local_ip: str | None,
    conf: Mapping[str, str],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """The settings for a named master, which this host reaches from its address `local_ip`.

    Executors are given that address of the driver, unless `conf` has another, or `environ` has one
    in SPARK_LOCAL_IP, as Spark reads it.
    """
    settings = _everywhere(app) | {"spark.master": master}
    settings |= {f"spark.executorEnv.{name}": value for name, value in ONE_THREAD.items()}
    set_here = environ.get("SPARK_LOCAL_IP")
    if local_ip and not set_here:
        settings["spark.driver.host"] = local_ip
    if (local_ip or set_here) and "spark.driver.host" in conf:
        # Spark would bind the address that executors are given, which may be a NAT's.
        settings["spark.driver.bindAddress"] = set_here or str(local_ip)
    return settings | dict(conf)


def submission(app: str, submitted_name: str | None, conf: Mapping[str, str]) -> dict[str, str]:
    """The settings that are added to those of spark-submit, which names a program by its file."""
    named = submitted_name and not submitted_name.endswith(".py")
    settings = _everywhere(submitted_name if named and submitted_name else app)
    settings |= {f"spark.executorEnv.{name}": value for name, value in ONE_THREAD.items()}
    return settings | dict(conf)


def cluster_environment(
    folder: Path, environ: Mapping[str, str], local_ip: str | None
) -> dict[str, str]:
    """The variables of a cluster's driver, which keeps its own files in `folder`.

    As Spark settings they would reach the executors, which have their own folders. The Python is
    the driver's unless `environ` names the cluster's. Without SPARK_LOCAL_IP Spark resolves the
    host's name, and its JVM does not start where that fails.
    """
    java_options = f'{environ.get("JAVA_TOOL_OPTIONS", "")} "-Djava.io.tmpdir={folder}"'
    address = environ.get("SPARK_LOCAL_IP") or local_ip
    return pythons(environ) | {
        "JAVA_TOOL_OPTIONS": java_options.strip(),
        "SPARK_LOCAL_DIRS": str(folder),
        **({"SPARK_LOCAL_IP": address} if address else {}),
    }


def starts_java(url: str) -> bool:
    """Return whether a session at a cluster's URL starts a JVM of its own, for the driver."""
    return url != SUBMITTED and not url.startswith("sc://")


def hide_url_options(url: str) -> str:
    """A URL without its options, safe to show: a Spark Connect URL may carry a token."""
    return url.partition(";")[0]


def without_options(said: str, url: str) -> str:
    """The message `said` about a URL, with the values of the URL's options removed."""
    for option in filter(None, url.split(";")[1:]):
        said = said.replace(option, f"{option.partition('=')[0]}=...")
    return said


def addresses(url: str, environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Host and port of each server that a cluster's URL names; none for `submitted`.

    Those of `yarn` are the ResourceManagers in the files that `environ` points to, if they name
    any. Raises BadInput for any other URL.
    """
    if url == SUBMITTED:
        if "PYSPARK_GATEWAY_PORT" not in environ:
            raise BadInput(
                f"Spark at {SUBMITTED}",
                expected="this program to be run by spark-submit",
                got="a program of its own",
                hint="name the master, such as spark://HOST:PORT, or use spark-submit"
                " (docs/how-to/spark-submit.md)",
            )
        return []
    if url == "yarn":
        folders = [environ[name] for name in _HADOOP if name in environ]
        if not folders:
            raise BadInput("Spark on yarn", expected="HADOOP_CONF_DIR to be set", got="none")
        return [manager for folder in folders for manager in read_resource_managers(Path(folder))]
    scheme, _, rest = url.partition("://")
    try:
        if scheme == "spark":
            return [_address(f"spark://{part}") for part in rest.split(",")]
        if scheme == "k8s":
            return [_address(rest if "://" in rest else f"https://{rest}")]
        if scheme == "sc":
            return [_address(url)]
    except ValueError:
        pass  # The port is not a number, or missing where there is no default.
    raise BadInput(
        "Spark URL",
        expected="spark://HOST:PORT, yarn, k8s://HOST:PORT, sc://HOST:PORT, submitted or local[N]",
        got=f"{hide_url_options(url)!r}",
    )


def name_servers(url: str, servers: Sequence[tuple[str, int]]) -> str:
    """A name of a cluster's servers for errors, without the URL's options."""
    if url != "yarn":
        return f"Spark at {hide_url_options(url)}"
    managers = " or ".join(f"{host}:{port}" for host, port in servers)
    return f"Spark at yarn, ResourceManager {managers} (yarn-site.xml)"


def read_resource_managers(folder: Path) -> list[tuple[str, int]]:
    """The addresses of YARN's ResourceManagers in a folder's yarn-site.xml; empty if none is there.

    Raises BadInput for a file that is damaged.
    """
    path = folder / "yarn-site.xml"
    try:
        properties = {
            entry.findtext("name", "").strip(): entry.findtext("value", "").strip()
            for entry in ET.parse(path).getroot().iter("property")
        }
    except FileNotFoundError:
        return []
    except (OSError, ET.ParseError) as error:
        raise BadInput(path, expected="settings of YARN as XML", got=str(error)) from None
    ids = [name.strip() for name in properties.get(f"{_MANAGER}.ha.rm-ids", "").split(",")]
    managers = []
    for suffix in [f".{name}" for name in ids if name] or [""]:
        host = properties.get(f"{_MANAGER}.hostname{suffix}", "")
        address = properties.get(f"{_MANAGER}.address{suffix}") or (f"{host}:8032" if host else "")
        address = re.sub(r"\$\{([^}]+)\}", lambda found: properties.get(found[1], ""), address)
        name, _, port = address.rpartition(":")
        if name and port.isdecimal():
            managers.append((name, int(port)))
    return managers


def stays_here(url: str) -> bool:
    """Return whether the traffic between the processes of the Spark at `url` stays on this host."""
    if parse_local_master(url, 1):
        return True
    hosts = [host for host, _ in addresses(url, {})] if url.startswith("spark://") else []
    return bool(hosts) and all(map(on_this_host, hosts))


def check_guarded(master: str, settings: Mapping[str, str | None]) -> None:
    """Raise BadInput unless Spark's processes authenticate each other and encrypt their traffic.

    `settings` are the session's own, by the names in GUARDS. A worker's join token is sent between
    these processes, inside its task's closure.
    """
    missing = [name for name in GUARDS if str(settings.get(name)).lower() != "true"]
    if missing and not stays_here(master):
        raise BadInput(
            f"Spark at {master}",
            expected=(
                f"{' and '.join(f'{name}=true' for name in missing)} where "
                "shards are open to other hosts: set them in "
                "spark-defaults.conf, and on a standalone cluster "
                "spark.authenticate.secret with them "
                "(docs/explanation/security.md), or give --plaintext"
            ),
        )


def find_submission_port(settings: Mapping[str, str | None]) -> int:
    """The port where a standalone master takes programs over HTTP, as far as a session knows it.

    Only the master knows for sure: a session has its setting where both read one
    spark-defaults.conf.
    """
    text = settings.get(SUBMISSION_PORT) or _USUAL_SUBMISSION_PORT
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= LAST_PORT:
        raise BadInput(SUBMISSION_PORT, expected=f"a port from 1 to {LAST_PORT}", got=text)
    return int(text)


def check_connect(url: str) -> None:
    """Raise BadInput for a Spark Connect server on another host that is reached without TLS."""
    if not url.startswith("sc://") or all(on_this_host(host) for host, _ in addresses(url, {})):
        return
    options = dict(part.partition("=")[::2] for part in url.split(";")[1:])
    if options.get("use_ssl", "").lower() != "true" and not options.get("token"):
        raise BadInput(
            f"Spark at {hide_url_options(url)}",
            expected=(
                ";use_ssl=true or ;token=... in the URL where shards are open "
                "to other hosts, or give --plaintext"
            ),
        )


def _everywhere(app: str) -> dict[str, str]:
    return {
        "spark.app.name": app,
        "spark.ui.showConsoleProgress": "false",
        # Two attempts at one partition would be two workers of one name that fence each other off.
        "spark.speculation": "false",
    }


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    port = parts.port if parts.port is not None else _DEFAULT_PORTS.get(parts.scheme)
    if not parts.hostname or not port:
        raise ValueError(url)
    return parts.hostname, port
