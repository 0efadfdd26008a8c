"""A figure's numbers as a CSV beside it: one row a dataclass, columns by field name."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import fields
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def as_csv(rows: Sequence[DataclassInstance]) -> bytes:
    """Return `rows`, all of one kind, as CSV; no row gives no byte."""
    out = StringIO()
    if rows:
        names = [item.name for item in fields(rows[0])]
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: getattr(row, name) for name in names} for row in rows)
    return out.getvalue().encode()


def whole_percent(share: float) -> str:
    """Return 0.382 as `38 %`."""
    return f"{100 * share:.0f} %"
