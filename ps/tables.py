"""A job's named tables on its shards, as its user describes them.

A `Dense` table holds arrays in the user's own structure (ps/pytree.py), and says how the shards
update them: rule, rate, weight decay, guard, compression. A `Sparse` table holds rows by 64-bit id,
which come into being when they are first pushed. `Tables` names the tables of a job.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ps.pytree import Form, Structure, zeros
from ps.session.compression import Compression, compression_of, compression_of_rows
from shards import argument_checks
from shards.errors import BadInput
from shards.first_values import Init, Uniform, init_of
from shards.gradient_guard import Guard
from shards.plurals import format_count
from shards.rules import Decay, Rule, decay_of, row_rule_of, rule_of
from shards.schedules import Schedule, schedule_of
from shards.tables import MAX_STORED, DenseTable, Layout, SparseTable, TensorSpec

Floats = NDArray[np.float32]

ONLY = "weights"
"""The name of the table of a job that was described without one."""
_UNSCALED = (1.0, 1.0)
_ROW_SETTINGS = ("rule", "rate", "decay", "guard", "compression", "init", "seed", "rows")
_SETTINGS = ("rule", "rate", "decay", "guard", "compression", "multipliers", "buffers")


class TableForm(msgspec.Struct, frozen=True, kw_only=True):
    """A `Dense` as a value that travels: all but its tensors and their first values.

    `rule` has the name and the settings of the rule, which may be one of the user's own.
    """

    structure: Form
    rule: dict[str, Any]
    rate: Schedule
    decay: Decay
    guard: Guard
    compression: Compression


class Dense:
    """A table of arrays: their structure, their first values, and how the shards update them.

    Make one with `like` or `zeros`.
    """

    def __init__(
        self,
        params: object,
        *,
        rule: Rule | str = "sgd",
        rate: Schedule | float = 0.01,
        decay: Decay | float = 0.0,
        guard: Guard | None = None,
        compression: Compression | str | None = None,
        multipliers: Mapping[str, tuple[float, float]] | None = None,
        buffers: Collection[str] = (),
    ) -> None:
        """As `like`."""
        self.structure = Structure("params", params)
        self.rule = rule_of("rule", rule)
        self.rate = schedule_of("rate", rate)
        self.decay = decay_of("decay", decay)
        self.guard = (
            Guard() if guard is None else argument_checks.instance("guard", guard, Guard, "a Guard")
        )
        self.compression = compression_of("compression", compression)
        tensors = _apply_multipliers(self.structure.tensors, multipliers)
        self.tensors = _with_buffers(tensors, buffers)
        self.start = params

    def __repr__(self) -> str:
        tensors = format_count(len(self.tensors), "tensor")
        floats = sum(tensor.size for tensor in self.tensors)
        return f"<Dense of {tensors}, {floats} floats, rule={self.rule}, rate={self.rate}>"

    @classmethod
    def like(cls, params: object, **settings: Any) -> "Dense":
        """A table with the structure of `params`, which are also its first values.

        `params` is a dict, list or tuple of float arrays, nested as you like, such as a JAX pytree
        or a PyTorch `dict(model.named_parameters())`; or one array. Each array has a name, its path
        joined by dots. The settings, all optional:

        - `rule`: the update rule, such as `ps.Adam()`, or its name; plain SGD.
        - `rate`: the learning rate, a number or a schedule such as `ps.Step(...)`; 0.01.
        - `decay`: the weight decay, a number for L2, or a `ps.Decay`; none.
        - `guard`: which gradients are refused, a `ps.Guard`; those that are not finite.
        - `compression`: how pushes and pulls travel, as `"int8"`; as plain float32.
        - `multipliers`: by an array's name, its factors of the rate and of the decay, such as
          `{"fc.bias": (2.0, 0.0)}`;
        - `buffers`: names of arrays that are not trained, such as running means: what is pushed for
          them is subtracted as it is, whatever the rule and the rate.

        Values are float32 on the shards. Raises BadInput naming the array or the setting at fault.
        """
        argument_checks.check_names("Dense: settings", settings, _SETTINGS)
        return cls(params, **settings)

    @classmethod
    def zeros(cls, shapes: Mapping[str, Any], **settings: Any) -> "Dense":
        """A table of zeros: shapes by name, such as `{"w": (3, 4), "b": 4}`; settings as `like`."""
        if not isinstance(shapes, Mapping):
            raise argument_checks.wrong("shapes", "a dict of shapes by name", shapes)
        table = DenseTable(ONLY, tuple(TensorSpec(name, shape) for name, shape in shapes.items()))
        try:
            arena = table.empty()
        except MemoryError:
            gigabytes = 4 * table.size / 1e9
            raise BadInput(
                "shapes",
                expected="a table that fits into memory",
                got=f"{table.size:,} floats, {gigabytes:,.0f} GB",
            ) from None
        return cls.like(table.views(arena), **settings)

    @classmethod
    def from_table(cls, table: DenseTable, form: TableForm | None) -> "Dense":
        """The table of a running job; without a form its arrays are a dict by name.

        Its first values are zeros. A rule that this process does not know is left as the default.
        Raises BadInput where the form is not that of the table.
        """
        if form is None:
            dense = cls(table.views(table.empty()))
        else:
            try:
                params = zeros(form.structure, iter(table.tensors))
            except (StopIteration, RuntimeError):
                raise _misfit(table) from None
            dense = cls(
                params,
                rate=form.rate,
                decay=form.decay,
                guard=form.guard,
                compression=form.compression,
            )
            with suppress(msgspec.ValidationError):
                dense.rule = msgspec.convert(form.rule, Rule)
        if [tensor.name for tensor in dense.tensors] != [one.name for one in table.tensors]:
            raise _misfit(table)
        dense.tensors = table.tensors
        return dense

    @property
    def form(self) -> TableForm:
        """This description as a value that travels."""
        return TableForm(
            structure=self.structure.form,
            rule=msgspec.to_builtins(self.rule),
            rate=self.rate,
            decay=self.decay,
            guard=self.guard,
            compression=self.compression,
        )

    def table(self, name: str) -> DenseTable:
        """The table as the shards know it."""
        return DenseTable(name, self.tensors)


class RowForm(msgspec.Struct, frozen=True, kw_only=True):
    """A `Sparse` as a value that travels: all but what the layout has."""

    rule: dict[str, Any]
    rate: Schedule
    decay: Decay
    guard: Guard
    compression: Compression = Compression()


class Sparse:
    """A table of rows by 64-bit id, such as the embeddings of users or of hashed features.

    No vocabulary is needed: a row that nobody has pushed has first values that follow from `init`,
    `seed` and its id, and it is stored when it is first pushed.
    """

    def __init__(
        self,
        dim: int,
        *,
        rule: Rule | str = "sgd",
        rate: Schedule | float = 0.01,
        decay: Decay | float = 0.0,
        guard: Guard | None = None,
        compression: Compression | str | None = None,
        init: Init | str | None = None,
        seed: int = 0,
        rows: int = MAX_STORED,
        **unknown: Any,
    ) -> None:
        """Rows of `dim` float32, 1 to 4,096.

        - `rule`: an update rule that works with rows, `ps.Adagrad()`, `ps.RowAdagrad()`,
          `ps.Adam()`, `ps.FTRL()`, `ps.Momentum()` or `ps.Nesterov()`, or its name; plain SGD.
        - `rate`: the learning rate, a number or a schedule such as `ps.Step(...)`; 0.01.
        - `decay`: the weight decay of rows that are pushed, a number for L2, or a `ps.Decay`; none.
        - `guard`: which gradients are refused, a `ps.Guard`; those that are not finite.
        - `compression`: how pushed rows travel, `"bf16"` or `"int8"`, rounded to the nearest; with
          `ps.Compression.parse("int8", "bf16")` pulled rows, too; as plain float32.
        - `init`: first values, such as `ps.Normal(0.1)` or `"zeros"`; `ps.Uniform(0.01)`.
        - `seed`: a whole number; tables of other seeds have other first values.
        - `rows`: the most rows that may be stored, over all shards; beyond it, pushes of new ids
          raise `ps.errors.Full`, and the shards without room apply nothing of them.

        Raises BadInput naming the setting, also for one that only dense tables have.
        """
        argument_checks.check_names("Sparse: settings", unknown, _ROW_SETTINGS)
        self.rule = row_rule_of("rule", rule)
        self.rate = schedule_of("rate", rate)
        self.decay = decay_of("decay", decay)
        self.guard = (
            Guard() if guard is None else argument_checks.instance("guard", guard, Guard, "a Guard")
        )
        self.compression = compression_of_rows("Sparse: compression", compression)
        first_values = Uniform(0.01) if init is None else init_of("Sparse: init", init)
        self._table = SparseTable(ONLY, dim, first_values, seed, rows)

    def __repr__(self) -> str:
        table = self._table
        return (
            f"Sparse({table.dim}, rule={self.rule}, rate={self.rate}, init={table.init},"
            f" seed={table.seed}, rows={table.rows})"
        )

    @classmethod
    def from_table(cls, table: SparseTable, form: RowForm | None) -> "Sparse":
        """The table of a running job; a rule that this process does not know is the default."""
        settings: dict[str, Any] = {"init": table.init, "seed": table.seed, "rows": table.rows}
        if form is None:
            return cls(table.dim, **settings)
        settings |= {"rate": form.rate, "decay": form.decay, "guard": form.guard}
        sparse = cls(table.dim, compression=form.compression, **settings)
        with suppress(msgspec.ValidationError):
            sparse.rule = msgspec.convert(form.rule, Rule)
        return sparse

    @property
    def form(self) -> RowForm:
        """This description as a value that travels."""
        rule = msgspec.to_builtins(self.rule)
        return RowForm(
            rule=rule,
            rate=self.rate,
            decay=self.decay,
            guard=self.guard,
            compression=self.compression,
        )

    @property
    def dim(self) -> int:
        """The floats of a row."""
        return self._table.dim

    def table(self, name: str) -> SparseTable:
        """The table as the shards know it."""
        return structs.replace(self._table, name=name)


class Tables(Mapping[str, Dense | Sparse]):
    """The tables of a job, by name: `ps.Tables(net=ps.Dense.like(params), user=ps.Sparse(16))`.

    An immutable mapping from names to `ps.Dense` and `ps.Sparse`, in the order given. Each table
    has its own rule, rate, decay and guard, and a step pushes to those that it names, as one.
    """

    def __init__(
        self,
        tables: Mapping[str, Dense | Sparse] | None = None,
        /,
        **named: Dense | Sparse,
    ) -> None:
        """Take the tables as keywords, or as a dict where a name is not an identifier.

        Raises BadInput for no table at all, for a name that is empty, too long or not printable,
        and for a value that is neither a `ps.Dense` nor a `ps.Sparse`.
        """
        if not isinstance(tables, Mapping | None):
            raise argument_checks.wrong("tables", "a dict of tables by name", tables)
        self._tables = {**(tables or {}), **named}
        if not self._tables:
            raise BadInput(
                "tables", expected="at least one, such as net=ps.Dense.like(params)", got="none"
            )
        for name, table in self._tables.items():
            argument_checks.name("tables: name", name)
            if not isinstance(table, Dense | Sparse):
                raise argument_checks.wrong(f"tables: {name}", "a ps.Dense or a ps.Sparse", table)

    def __repr__(self) -> str:
        return f"Tables({self._tables!r})"

    @property
    def dense(self) -> dict[str, Dense]:
        """The dense tables, by name."""
        return {name: table for name, table in self.items() if isinstance(table, Dense)}

    @property
    def sparse(self) -> dict[str, Sparse]:
        """The sparse tables, by name."""
        return {name: table for name, table in self.items() if isinstance(table, Sparse)}

    @property
    def layout(self) -> Layout:
        """The tables as the shards know them."""
        return Layout.of(table.table(name) for name, table in self.items())

    def __getitem__(self, name: str) -> Dense | Sparse:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def _with_buffers(
    tensors: tuple[TensorSpec, ...], buffers: Collection[str]
) -> tuple[TensorSpec, ...]:
    """The tensors with those that are buffers marked; raises BadInput."""
    names = argument_checks.items("buffers", buffers, "a list of names of arrays")
    marked = {argument_checks.name("buffers", name) for name in names}
    unknown = marked - {tensor.name for tensor in tensors}
    if unknown:
        shown = ", ".join(sorted(tensor.name for tensor in tensors)[:6])
        raise BadInput(
            "buffers", expected=f"names of arrays such as {shown}", got=f"{min(unknown)!r}"
        )
    return tuple(structs.replace(tensor, buffer=tensor.name in marked) for tensor in tensors)


def tables_of(value: object) -> Tables:
    """The tables in `value`: Tables, one table, or parameters for one table named `weights`."""
    if isinstance(value, Tables):
        return value
    return Tables({ONLY: value if isinstance(value, Dense | Sparse) else Dense.like(value)})


def _misfit(table: DenseTable) -> BadInput:
    return BadInput(
        f"table {table.name}",
        expected=f"a structure of its {len(table.tensors)} tensors",
        got="another",
    )


def _apply_multipliers(
    tensors: tuple[TensorSpec, ...], multipliers: Mapping[str, tuple[float, float]] | None
) -> tuple[TensorSpec, ...]:
    """The tensors with the factors that are given for some of them; raises BadInput."""
    if multipliers is None:
        return tensors
    if not isinstance(multipliers, Mapping):
        raise argument_checks.wrong("multipliers", "a dict of two numbers by name", multipliers)
    names = {tensor.name for tensor in tensors}
    for name, pair in multipliers.items():
        if name not in names:
            shown = ", ".join(sorted(names)[:6])
            raise BadInput(
                "multipliers", expected=f"names of arrays such as {shown}", got=f"{name!r}"
            )
        expected = "two numbers, the factors of the rate and of the decay"
        if len(argument_checks.items(f"multipliers: {name}", pair, expected)) != len(_UNSCALED):
            raise argument_checks.wrong(f"multipliers: {name}", expected, pair)
    return tuple(
        TensorSpec(tensor.name, tensor.shape, *multipliers.get(tensor.name, _UNSCALED))
        for tensor in tensors
    )
