"""Whether shards grow: the slope of their resident memory over a run."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import psutil

_EVERY_S = 1.0
_WARM = 0.25  # of a run, in which caches and allocators fill


class Memory:
    """Looks at processes now and then. One that was restarted counts anew."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self._looked_at = -_EVERY_S

    def look(self, processes: Mapping[str, int], now: float) -> None:
        """Note what these processes hold, `now` seconds into the run, if it is time."""
        if now < self._looked_at + _EVERY_S:
            return
        self._looked_at = now
        for name, pid in processes.items():
            self._seen[name, pid].append((now, psutil.Process(pid).memory_info().rss))

    def slopes(self) -> dict[str, float]:
        """MB an hour that each grew by, of those that were seen for long enough: a line's slope."""
        found = {}
        for (name, _), looks in self._seen.items():
            late = np.array([look for look in looks if look[0] >= _WARM * looks[-1][0]])
            if len(late) > 2:
                found[name] = float(np.polyfit(late[:, 0] / 3600, late[:, 1] / 1e6, 1)[0])
        return found
