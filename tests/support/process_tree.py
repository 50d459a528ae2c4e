"""The processes below one, while some of them end."""

import psutil


def list_commands(pid: int | None = None) -> list[tuple[psutil.Process, list[str]]]:
    """The living processes below process `pid`, by default this one, with their command lines.

    Those that end meanwhile, or have ended and wait to be reaped, are left out.
    """
    commands = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            commands.append((process, process.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return commands
