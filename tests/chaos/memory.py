"""Whether processes grow: the slope of their resident memory over a run."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import psutil

_EVERY_S = 1.0
_WARM = 0.25  # of a run, in which caches and allocators fill
_MOST = 0.9  # of it: what lived for less says nothing


class Memory:
    """Looks at processes now and then. One that was restarted is another."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self._looked_at = -_EVERY_S
        self._began_at = 0.0

    def look(self, processes: Mapping[str, int], now: float) -> None:
        """Note what these processes hold, `now` seconds into the run, if it is time."""
        if now < self._looked_at + _EVERY_S:
            return
        if not self._seen:
            self._began_at = now
        self._looked_at = now
        for name, pid in processes.items():
            self._seen[name, pid].append((now, psutil.Process(pid).memory_info().rss))

    def slopes(self) -> dict[str, float]:
        """MB an hour that each grew by which lived nearly all along: a line's slope."""
        found = {}
        lasted_s = 0.0 if not self._seen else self._looked_at - self._began_at
        for (name, _), looks in self._seen.items():
            at_s, held = np.array(looks).T
            late = at_s >= self._began_at + _WARM * lasted_s
            if at_s[-1] - at_s[0] >= _MOST * lasted_s and late.sum() > 2:
                found[name] = float(np.polyfit(at_s[late] / 3600, held[late] / 1e6, 1)[0])
        return found
