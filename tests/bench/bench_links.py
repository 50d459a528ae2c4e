"""MB/s each way over a real line with latency: RTT of 0 to 200 ms, 1 to 8 updates in flight.

Two network namespaces, a TUN device in each, and a small program between them that delays and paces
packets (delayed_line.c): TCP, its windows and its losses are the kernel's own, end to end. One
worker pushes and pulls a million floats over 1 Gbit/s, with so many of both in flight. `tuned` lets
TCP's buffers grow to 64 MB; `default` leaves this machine's limits. Each is measured over as many
connections as the client opens by itself, and over one.

Needs root, ip (iproute2), a C compiler and /dev/net/tun; says what is missing and ends.

    python tests/bench/bench_links.py [--rtts 0,10,50,100,200] [--in-flight 1,2,4,8] [--seconds 4]
                                      [--limits tuned,default] [--connections auto,1]
                                      [--control reno]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from ps import AdminClient, Cluster, DenseTable, TensorSpec
from ps.client import Client
from ps.job_spec import make_cluster, shard_specs
from ps.server.server import ShardServer
from ps.transport.transports import Transport
from tests.bench.report import Goal, goals, save

_RATE = 125e6
_FLOATS = 1_000_000
_NEAR_HOST, FAR_HOST = "10.77.0.1", "10.77.0.2"
_LIMITS = {"tuned": "4096 131072 67108864", "default": None}
_AUTO = "auto"
_WARM_S = 8.0  # in which TCP finds its window: some forty round trips of 200 ms
_TARGETS = {100: 0.98, 200: 0.92}
_LINE = Path(__file__).with_name("delayed_line.c")


def missing() -> str | None:
    """Why the line cannot be made here, if it cannot."""
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    for program in ("ip", "cc"):
        if shutil.which(program) is None:
            return f"it needs {program}"
    if not Path("/dev/net/tun").exists():
        return "it needs /dev/net/tun"
    made = subprocess.run(["ip", "netns", "add", _name("try")], capture_output=True, check=False)
    if made.returncode:
        return f"no network namespaces: {made.stderr.decode().strip()}"
    _run("ip", "netns", "del", _name("try"))
    return None


def _name(end: str) -> str:
    return f"dp{end}{os.getpid() % 100000}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def build_line(folder: Path) -> Path:
    """Compile the program of the line."""
    binary = folder / "delayed_line"
    _run("cc", "-O2", "-o", str(binary), str(_LINE))
    return binary


@contextmanager
def line(
    binary: Path,
    rtt_ms: float,
    buffers: str | None,
    control: str | None,
    rate: float = _RATE,
) -> Iterator[tuple[str, str]]:
    """Two namespaces with the line between them; their names.

    `control` is TCP's congestion control, this machine's where none is said; `rate` is in bytes a
    second.
    """
    near, far = _name("a"), _name("b")
    queue = str(round(rate * 0.2))
    with ExitStack() as stack:
        for space in (near, far):
            _run("ip", "netns", "add", space)
            stack.callback(_run, "ip", "netns", "del", space)
        command = [str(binary), near, far, str(round(rtt_ms * 500)), str(rate), queue]
        program = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(program.kill)
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n", "the line did not come up"
        for space, address in ((near, _NEAR_HOST), (far, FAR_HOST)):
            inside = ("ip", "netns", "exec", space)
            _run("ip", "link", "set", space, "netns", space)
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "ip", "link", "set", space, "txqueuelen", "10000", "up")
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", space)
            for limit in ("tcp_rmem", "tcp_wmem") if buffers else ():
                _run(*inside, "sysctl", "-qw", f"net.ipv4.{limit}={buffers}")
            if control is not None:
                _run(*inside, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={control}")
        yield near, far


def serve(path: Path) -> None:
    """The shard, until its standard input ends."""
    table = DenseTable("far", (TensorSpec("w", (_FLOATS,)),))
    specs = shard_specs(table)
    with ShardServer(
        specs[0], boot=1, bind=f"tcp://{FAR_HOST}:*", transport=Transport.TCP, plaintext=True
    ) as server:
        cluster = make_cluster(specs, [server.endpoint])
        with AdminClient(cluster) as console:
            console.install(table.empty())
        cluster.save(path)
        print("ready", flush=True)
        sys.stdin.read()


def work(path: Path, in_flight: Sequence[int], stripes: int | None, seconds: float) -> None:
    """The worker: prints updates a second for each number in flight."""
    cluster = Cluster.load(path)
    for most in in_flight:
        with Client(
            cluster,
            worker=f"w{most}",
            in_flight=most,
            patience_s=60.0,
            transport=Transport.TCP,
            stripes=stripes,
        ) as client:
            gradient = np.zeros(cluster.layout.size, np.float32)
            begun, counted, until = 0.0, 0, time.monotonic() + _WARM_S
            while True:
                client.pull()
                for further in range(1, most):
                    client.prefetch(client.clock + further)
                client.push(gradient)
                now = time.monotonic()
                if begun:
                    counted += 1
                    if now - begun > seconds:
                        break
                elif now > until:
                    begun = now
            print(f"{counted / (now - begun)}", flush=True)


def measure(
    binary: Path,
    rtt_ms: float,
    limits: str,
    connections: str,
    given: argparse.Namespace,
) -> list[float]:
    """MB/s each way, for each number in flight."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        near, far = stack.enter_context(line(binary, rtt_ms, _LIMITS[limits], given.control))
        here = [sys.executable, __file__, "--cluster", str(folder / "cluster.json")]
        server = stack.enter_context(
            subprocess.Popen(
                ["ip", "netns", "exec", far, *here, "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        stack.callback(server.kill)
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the shard did not come up"
        told = ["--in-flight", given.in_flight, "--seconds", str(given.seconds), "--work"]
        told += ["--connections", connections]
        done = subprocess.run(
            ["ip", "netns", "exec", near, *here, *told], stdout=subprocess.PIPE, check=True
        )
    return [float(rate) * 4 * _FLOATS / 1e6 for rate in done.stdout.split()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--rtts", default="0,10,50,100,200")
    options.add_argument("--in-flight", default="1,2,4,8")
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--limits", default=",".join(_LIMITS))
    options.add_argument("--connections", default=f"{_AUTO},1")
    options.add_argument("--control", help="TCP's congestion control: reno, bbr, cubic")
    options.add_argument("--cluster", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    in_flight = [int(word) for word in given.in_flight.split(",")]
    if given.serve:
        return serve(given.cluster)
    if given.work:
        stripes = None if given.connections == _AUTO else int(given.connections)
        return work(given.cluster, in_flight, stripes, given.seconds)
    if why := missing():
        print(f"bench_links: skipped: {why}")
        return None
    cases = [
        (limits, connections)
        for limits in given.limits.split(",")
        for connections in given.connections.split(",")
    ]
    found: dict[str, dict[int, list[float]]] = {f"{a}, {b}": {} for a, b in cases}
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        binary = build_line(Path(folder))
        heads = "".join(f"{most:>8} in flight" for most in in_flight)
        print(f"MB/s each way, connections     RTT ms{heads}   load")
        for rtt_ms in map(int, given.rtts.split(",")):
            for (limits, connections), table in zip(cases, found.values(), strict=True):
                table[rtt_ms] = measure(binary, rtt_ms, limits, connections, given)
                rates = "".join(f"{rate:18.1f}" for rate in table[rtt_ms])
                case = f"{limits}, {connections}"
                print(f"{case:28}{rtt_ms:9}{rates}{os.getloadavg()[0]:7.1f}", flush=True)
    print(save("links", {"rate": _RATE, "in_flight": in_flight, "mb_per_s": found}))
    goals(
        Goal(
            f"{rtt_ms} ms, {in_flight[-1]} in flight, {limits} limits: of the line",
            found[f"{limits}, {_AUTO}"][rtt_ms][-1] * 1e6 / _RATE,
            target,
            at_least=True,
        )
        for limits, connections in cases
        for rtt_ms, target in _TARGETS.items()
        if connections == _AUTO and rtt_ms in found[f"{limits}, {_AUTO}"]
    )
    return None


if __name__ == "__main__":
    main()
