"""Bills of materials: checked by CycloneDX's own schema, and their parts."""

from collections.abc import Iterator
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator


def check_bill(text: str) -> None:
    """Fail unless a bill fits the strict schema of CycloneDX 1.6."""
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert error is None, error


def list_parts(bill: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All components of a bill, those in components included."""
    for part in bill.get("components", ()):
        yield part
        yield from list_parts(part)
