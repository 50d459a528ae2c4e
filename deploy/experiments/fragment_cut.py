"""The cut of a problem's table into fragments, for the strategies that exchange each by itself.

A problem computes in the arena of its one table. In the arena of several tables each tensor has
another place, because every table is padded; so weights and gradients are copied from one to the
other, a run of tensors at a time.
"""

from itertools import accumulate

from shards.errors import BadInput
from shards.tables import DenseTable, Layout, TensorSpec
from worker.strategies.base import Floats
from worker.strategies.fragments import EMBEDDINGS

_EMBEDDING = "embedding"  # the name of the tensor that has a fragment of its own


class FragmentCut:
    """A table in `fragments` tables, each a run of its tensors.

    A first tensor called embedding has the table of embeddings for itself; the rest is cut where
    the runs come close to equal sizes. With one fragment the table stays as it is. Raises BadInput
    for more fragments than tensors.
    """

    def __init__(self, table: DenseTable, fragments: int) -> None:
        if fragments > len(table.tensors):
            expected = f"at most {len(table.tensors)}, the tensors of {table.name}"
            raise BadInput("fragments", expected=expected, got=fragments)
        self._table = table
        runs = _cut_runs(table.tensors, fragments)
        self.layout = Layout((table,) if fragments == 1 else tuple(map(_name_run, runs, range(99))))
        self._places, number = list[tuple[slice, slice]](), 0
        for part, run in zip(self.layout.tables, runs, strict=True):
            # The last of a run has no padding here: that is not the same in both arenas.
            length = part.offsets[-1] + run[-1].size
            start, base = table.offsets[number], self.layout.section(part.name).start
            self._places.append((slice(start, start + length), slice(base, base + length)))
            number += len(run)

    def spread(self, whole: Floats) -> Floats:
        """The arena of the fragments with the content of the table's; the same with one."""
        if len(self.layout.tables) == 1:
            return whole
        arena = self.layout.empty()
        for place, part in self._places:
            arena[part] = whole[place]
        return arena

    def gather(self, arena: Floats) -> Floats:
        """The table's arena with the content of that of the fragments; the same with one."""
        if len(self.layout.tables) == 1:
            return arena
        whole = self._table.empty()
        for place, part in self._places:
            whole[place] = arena[part]
        return whole


def _name_run(run: tuple[TensorSpec, ...], number: int) -> DenseTable:
    alone = run[0].name == _EMBEDDING
    return DenseTable(EMBEDDINGS if alone else f"fragment{number}", run)


def _cut_runs(tensors: tuple[TensorSpec, ...], count: int) -> list[tuple[TensorSpec, ...]]:
    """Cut tensors into this number of runs."""
    if count == 1:
        return [tensors]
    if tensors[0].name == _EMBEDDING:
        return [tensors[:1], *_cut_runs(tensors[1:], count - 1)]
    sizes = list(accumulate(tensor.size for tensor in tensors))
    # The first run ends where its size is closest to an equal share, and leaves one for each other.
    first = min(
        range(1, len(tensors) - count + 2), key=lambda n: abs(sizes[n - 1] - sizes[-1] / count)
    )
    return [tensors[:first], *_cut_runs(tensors[first:], count - 1)]
