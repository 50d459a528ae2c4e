"""The weights of a problem in fragments, for the strategies that exchange each by itself.

A problem computes in the arena of its one table. In the arena of several tables each tensor has
another place, because every table is padded; so weights and gradients are copied from one to the
other, a tensor at a time.
"""

from shards.tables import DenseTable, Layout
from worker.strategies.base import Floats
from worker.training.model_cut import cut_model

_EMBEDDING = "embedding"  # the name of the tensor that has a fragment of its own


class FragmentCut:
    """A table in `fragments` tables, cut as a model of PyTorch is (worker/training/model_cut.py).

    Tables come in the order of their first tensors. With one fragment the table stays as it is.
    Raises BadInput for more fragments than tensors.
    """

    def __init__(self, table: DenseTable, fragments: int) -> None:
        self._table = table
        self.layout = Layout((table,) if fragments == 1 else _cut(table, fragments))
        offsets = dict(zip((tensor.name for tensor in table.tensors), table.offsets, strict=True))
        self._slices = list[tuple[slice, slice]]()
        for part in self.layout.tables:
            base = self.layout.section(part.name).start
            for tensor, offset in zip(part.tensors, part.offsets, strict=True):
                start = offsets[tensor.name]
                copy = slice(base + offset, base + offset + tensor.size)
                self._slices.append((slice(start, start + tensor.size), copy))

    def spread(self, whole: Floats) -> Floats:
        """The arena of the fragments with the content of the table's; the same with one."""
        if len(self.layout.tables) == 1:
            return whole
        arena = self.layout.empty()
        for original, copy in self._slices:
            arena[copy] = whole[original]
        return arena

    def gather(self, arena: Floats) -> Floats:
        """The table's arena with the content of that of the fragments; the same with one."""
        if len(self.layout.tables) == 1:
            return arena
        whole = self._table.empty()
        for original, copy in self._slices:
            whole[original] = arena[copy]
        return whole


def _cut(table: DenseTable, fragments: int) -> tuple[DenseTable, ...]:
    tensors = {tensor.name: tensor for tensor in table.tensors}
    sizes = {name: tensor.size for name, tensor in tensors.items()}
    cut = cut_model(sizes, {_EMBEDDING}, fragments)
    tables = [
        DenseTable(name, tuple(map(tensors.__getitem__, names))) for name, names in cut.items()
    ]
    return tuple(sorted(tables, key=lambda part: table.tensors.index(part.tensors[0])))
