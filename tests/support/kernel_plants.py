"""Plants defects in every kernel, and checks that its cases find them: `make check C=plants`.

Each rule changes the body of every kernel of a source. A kernel's cases must then end in a fault of
the emulator or in a wrong result. A kernel that a rule does not apply to is left as it is; the
first rule applies to all.

    python -m tests.support.kernel_plants [SOURCE ...]
"""

import os
import re
import sys
from collections.abc import Callable, Sequence

from cupy_kernels import sources
from cupy_kernels.emulator import Emulator, KernelFault, Schedule, build
from cupy_kernels.registry import KERNELS
from tests.cupy_kernels.cases import every_case
from tests.support.kernel_check import check

_OPERATORS = ((" += ", " -= "), (" * ", " + "), (" + ", " - "), (" - ", " + "))


def idle(body: str) -> str:
    """The first thread of the first block does nothing."""
    return f"if (blockIdx.x + blockIdx.y + threadIdx.x + threadIdx.y == 0) return; {body}"


def operator(body: str) -> str:
    """The first operator of a kind is another one."""
    for old, new in _OPERATORS:
        if old in body:
            return body.replace(old, new, 1)
    return body


RULES: dict[str, Callable[[str], str]] = {"idle thread": idle, "other operator": operator}


def planted(text: str, rule: Callable[[str], str]) -> tuple[str, set[str]]:
    """A source with a defect in each kernel that the rule applies to, and those kernels' names."""
    changed: set[str] = set()
    for name in sources.kernel_names(text):
        begin = text.index("{", _end(text, re.search(rf"\b{name}\s*\(", text)))
        end = _closing(text, begin, "{", "}")
        body = text[begin + 1 : end]
        if rule(body) != body:
            text = text[: begin + 1] + rule(body) + text[end:]
            changed.add(name)
    return text, changed


def missed(source: str, rule: str) -> tuple[set[str], set[str]]:
    """The kernels of a source with a planted defect, and those whose cases do not find it."""
    text, changed = planted(sources.text(source), RULES[rule])
    build.load(text, source)  # once, and not in every child
    return changed, {name for name in changed if not _found(name, text)}


def _found(kernel: str, text: str) -> bool:
    """Whether any case of a kernel fails with this source; tried in a child, which may crash."""
    child = os.fork()
    if child == 0:
        os._exit(_try(kernel, text))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _try(kernel: str, text: str) -> int:
    engine = Emulator(Schedule.FORWARD, source=text)
    for case in every_case():
        if case.kernel == kernel:
            try:
                check(case, engine)
            except (KernelFault, AssertionError):
                return 1
    return 0


def _end(text: str, match: re.Match[str] | None) -> int:
    """The place behind the parameters that begin at a match."""
    assert match is not None, "the name is that of a kernel of the text"
    return _closing(text, match.end() - 1, "(", ")")


def _closing(text: str, begin: int, left: str, right: str) -> int:
    """The place of the bracket that closes the one at `begin`."""
    depth = 0
    for place in range(begin, len(text)):
        depth += (text[place] == left) - (text[place] == right)
        if not depth:
            return place
    raise AssertionError("a bracket without its end")


def main(chosen: Sequence[str]) -> int:
    """Report each source and rule; the exit status is 1 if a defect was not found."""
    status, kernels = 0, set[str]()
    for source in chosen or sources.names():
        for rule in RULES:
            changed, unseen = missed(source, rule)
            kernels |= changed
            status |= bool(unseen)
            found = f"{len(changed) - len(unseen):3} of {len(changed)} found"
            names = f"; missed in {', '.join(sorted(unseen))}" if unseen else ""
            print(f"{source:26}{rule:16}{found}{names}", flush=True)
    print(f"{len(kernels)} of {len(KERNELS)} kernels had a defect")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
