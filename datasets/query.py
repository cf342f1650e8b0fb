"""Which records of a store are wanted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, TypedDict

from kernelcast.datasets.segments import require_arrow

if TYPE_CHECKING:
    import pyarrow.compute as pc


class Conditions(TypedDict, total=False):
    """Conditions on records, all of which must be met; None, or leaving one out, asks for nothing.

    Attributes:
        operation: the operation's name.
        device: the device's name as recorded, or its fingerprint.
        workloads: names of workloads; records of any of them.
        outcome: one of :data:`kernelcast.datasets.record.OUTCOMES`.
        source: who measured: :attr:`kernelcast.datasets.record.Environment.source`.
        variant: the candidate's variant.
        before: measured before this moment, in seconds since the epoch; never a record whose time is unknown.
    """

    operation: str | None
    device: str | None
    workloads: Collection[str] | None
    outcome: str | None
    source: str | None
    variant: str | None
    before: float | None


@dataclass(frozen=True, slots=True)
class Query:
    """:class:`Conditions` as Arrow expressions."""

    operation: str | None = None
    device: str | None = None
    workloads: Collection[str] | None = None
    outcome: str | None = None
    source: str | None = None
    variant: str | None = None
    before: float | None = None

    def columns(self) -> set[str]:
        """The columns that :meth:`expression` reads."""
        names = ("operation", "outcome", "source", "variant")
        asked = {name for name in names if getattr(self, name) is not None}
        if self.device is not None:
            asked |= {"device", "device_fingerprint"}
        if self.workloads is not None:
            asked.add("workload")
        if self.before is not None:
            asked.add("created_at")
        return asked

    def identity(self) -> pc.Expression | None:
        """The part over facts that an id names. Records of one id agree in them, so it may be asked of single files,
        before one of the records is chosen.
        """
        return _all_of(self._identity_tests())

    def expression(self) -> pc.Expression | None:
        """All conditions; None if there are none."""
        tests = self._identity_tests()
        pa = require_arrow()
        field = pa.compute.field
        if self.device is not None:
            tests.append((field("device") == self.device) | (field("device_fingerprint") == self.device))
        if self.workloads is not None:
            tests.append(field("workload").isin(pa.array(self.workloads, pa.string())))
        if self.outcome is not None:
            tests.append(field("outcome") == self.outcome)
        if self.before is not None:
            tests.append((field("created_at") > 0) & (field("created_at") < self.before))
        return _all_of(tests)

    def _identity_tests(self) -> list[pc.Expression]:
        field = require_arrow().compute.field
        asked = (("operation", self.operation), ("source", self.source), ("variant", self.variant))
        return [field(name) == value for name, value in asked if value is not None]


def _all_of(tests: list[pc.Expression]) -> pc.Expression | None:
    return reduce(and_, tests) if tests else None
