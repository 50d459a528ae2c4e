"""Stand-ins for other libraries, for the old programs on the pages about moving from them.

Each file has the part of a library's API that its page uses, in the fewest lines that really train:
its `MODULES` are the library's modules by name, with their members.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def installed(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """A context in which these modules, and the packages that they are in, can be imported."""
    found: dict[str, ModuleType] = {}
    for name, members in modules.items():
        words = name.split(".")
        for end in range(1, len(words) + 1):
            part = ".".join(words[:end])
            module = found.setdefault(part, ModuleType(part))
            module.__path__ = []
            if end > 1:
                setattr(found[".".join(words[: end - 1])], words[end - 1], module)
        vars(found[name]).update(members)
    # Not by `patch.dict`, which would also forget what is imported for the first time in between.
    assert not found.keys() & sys.modules.keys()
    sys.modules.update(found)
    try:
        yield
    finally:
        for name in found:
            del sys.modules[name]
