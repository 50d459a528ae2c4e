"""Cuts a model into fragments, each a dense table of whole tensors.

Embeddings are apart, because reports on them are averaged in another way. The rest is packed
greedily, the largest tensor first, into the emptiest fragment. The cut depends on names and shapes
alone, so every worker makes the same.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import ps
from shards import argument_checks
from shards.errors import BadInput
from shards.plurals import format_count
from worker.strategies.fragments import EMBEDDINGS


def describe_fragments(
    sizes: Mapping[str, int],
    embeddings: Collection[str],
    count: int,
    settings: Mapping[str, Any],
    describe: Callable[[list[str], dict[str, Any]], ps.Dense],
) -> ps.Tables:
    """The tensors of a model as `count` tables, each of which `describe(names, settings)` makes.

    `sizes` are the floats of each tensor, `settings` those of all tables; `multipliers` are by
    tensor, and each table gets its own. Raises BadInput as `cut_model` does, and for names of
    tensors that the model does not have.
    """
    count = argument_checks.whole("fragments: count", count, 1)
    multipliers = settings.get("multipliers") or {}
    for label, names in (("multipliers", multipliers), ("embeddings", embeddings)):
        if unknown := sorted(set(names) - set(sizes)):
            raise BadInput(f"fragments: {label}", expected="tensors of the model", got=unknown[0])
    return ps.Tables(
        {
            table: describe(
                names,
                {**settings, "multipliers": {n: multipliers[n] for n in names if n in multipliers}},
            )
            for table, names in cut_model(sizes, embeddings, count).items()
        }
    )


def join_tables(values: Any) -> Any:
    """Values by name: of several tables, those of all together; others as they are."""
    if not (values and isinstance(values, Mapping)):
        return values
    if not all(isinstance(value, Mapping) for value in values.values()):
        return values
    return {name: value for table in values.values() for name, value in table.items()}


def cut_model(
    sizes: Mapping[str, int], embeddings: Collection[str], count: int
) -> dict[str, list[str]]:
    """The names of the tensors in each of `count` fragments, by its name, in the model's order.

    `sizes` are the floats of each tensor. Those of `embeddings` have a table of their own, unless
    there is only one. Raises BadInput for more fragments than tensors.
    """
    apart = [name for name in sizes if name in embeddings] if count > 1 else []
    rest = {name: size for name, size in sizes.items() if name not in apart}
    bins = count - bool(apart)
    if bins > len(rest):
        most = len(rest) + bool(apart)
        tensors = format_count(len(sizes), "tensor")
        raise BadInput(
            "fragments: count", expected=f"at most {most} for a model of {tensors}", got=count
        )
    packed = pack(rest, bins)
    width = len(str(bins - 1))
    named = {f"fragment{number:0{width}}": names for number, names in enumerate(packed)}
    return {**named, EMBEDDINGS: apart} if apart else named


def pack(sizes: Mapping[str, int], bins: int) -> list[list[str]]:
    """Spread names over `bins` of about equal size: the largest first, each into the emptiest."""
    filled, contents = [0] * bins, [set[str]() for _ in range(bins)]
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # equal ones keep their order
        # Of equally full ones that with the fewest, so that none stays empty.
        target = min(range(bins), key=lambda number: (filled[number], len(contents[number])))
        filled[target] += sizes[name]
        contents[target].add(name)
    return [[name for name in sizes if name in content] for content in contents]
