"""Plain values that users make: a wrong argument names the known ones, as with every function."""

from typing import Any

import msgspec

from shards import argument_checks
from shards.errors import BadInput

_OF_A_TABLE = {"lr": "rate", "learning_rate": "rate", "weight_decay": "decay"}


class NamedFields(msgspec.StructMeta):
    """The metaclass of a struct that users make: its errors are BadInput, in one line.

    Decoding does not come through here.
    """

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Make a value; raises BadInput naming the known arguments."""
        known = self.__struct_fields__
        for name in named:
            if name not in known and name in _OF_A_TABLE:
                setting = _OF_A_TABLE[name]
                raise BadInput(
                    self.__name__,
                    expected=", ".join(known) or "no argument",
                    got=f"{name!r} (a table has it: ps.Dense.like(params, {setting}=...))",
                )
        argument_checks.check_names(self.__name__, named, known)
        try:
            return super().__call__(*values, **named)
        except TypeError as error:
            raise BadInput(
                self.__name__, expected=", ".join(known) or "no argument", hint=error
            ) from None
