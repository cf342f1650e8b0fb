"""Versions of the record's fields, and the steps that bring an older one up to date when it is read.

A journal's line, a segment and the store itself each say with which version they were written. A newer one is refused;
an older one is taken through every step in between, in memory: files change only when the store is written to or
compacted. Standard library only, as the run time reads journals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    import pyarrow as pa

#: Version of the record's fields.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Migration:
    """One step: what was written with one version becomes what the next one would have written.

    Attributes:
        version: the older of the two.
        record: from a record as plain JSON values to the same of the next version, with the ``id`` that it then has.
        rows: from the columns of a segment to those of the next version, with the same ids.
    """

    version: int
    record: Callable[[dict[str, Any]], dict[str, Any]]
    rows: Callable[[pa.Table], pa.Table]


_migrations: dict[int, Migration] = {}


def register_migration(step: Migration) -> None:
    """Make a step known: the versions from which steps lead to the present one can be read.

    Raises:
        KernelcastError: its version is none that is older than the present one, or has a step already.
    """
    if not 0 <= step.version < SCHEMA_VERSION:
        raise KernelcastError(
            f"A migration from schema {step.version}: it must be between 0 and {SCHEMA_VERSION - 1}."
        )
    if step.version in _migrations:
        raise KernelcastError(f"There is a migration from schema {step.version} already.")
    _migrations[step.version] = step


def oldest_readable() -> int:
    """The oldest version from which steps lead to the present one."""
    version = SCHEMA_VERSION
    while version - 1 in _migrations:
        version -= 1
    return version


def require_readable(schema: int, what: str, error: type[KernelcastError]) -> None:
    """Refuse what has a version that cannot be read.

    Args:
        schema: its version.
        what: it, as the beginning of a sentence.
        error: what to raise.
    """
    if schema > SCHEMA_VERSION:
        raise error(
            f"{what} has schema {schema}; this kernelcast reads up to {SCHEMA_VERSION}. Upgrade kernelcast."
        )
    if schema < oldest_readable():
        raise error(
            f"{what} has schema {schema}; this kernelcast reads from {oldest_readable()} on. "
            "Export it with the kernelcast that wrote it, and import that."
        )


def migrate_record(data: Mapping[str, Any], schema: int) -> Mapping[str, Any]:
    """A record as plain JSON values, brought from a readable version to the present one."""
    for version in range(schema, SCHEMA_VERSION):
        data = {**_migrations[version].record(dict(data)), "schema": version + 1}
    return data


def migrate_rows(table: pa.Table, schema: int) -> pa.Table:
    """A segment's columns, brought from a readable version to the present one."""
    for version in range(schema, SCHEMA_VERSION):
        table = _migrations[version].rows(table)
    return table
