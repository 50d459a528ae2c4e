"""A benchmark in another process, and the update that both sides of a comparison measure."""

import select
import subprocess
import sys
import time

from ps.client import Client


class OtherProcess:
    """A program, such as the benchmark itself, that answers lines with lines."""

    def __init__(self, program: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout

    def say(self, line: str) -> None:
        self._in.write(line + "\n")
        self._in.flush()

    def has_answered(self) -> bool:
        return bool(select.select([self._out], [], [], 0)[0])

    def hear(self) -> str:
        line = self._out.readline()
        assert line, f"the other process ended with {self.process.wait()}"
        return line.strip()

    def end(self) -> None:
        self._in.close()
        self.process.wait(60)


def update_seconds(client: Client) -> float:
    """The seconds of a pull and an acknowledged push of the whole table."""
    started = time.perf_counter()
    client.pull()
    client.push(client.new_gradient(zeroed=False))
    client.flush()
    return time.perf_counter() - started
