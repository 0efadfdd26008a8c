"""A figure's numbers as a CSV beside it: one row a dataclass, columns by field name."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import fields
from io import StringIO
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def as_csv(kind: type[DataclassInstance], rows: Sequence[DataclassInstance]) -> bytes:
    """Return `rows`, all of `kind` with two fields or more, as CSV; without rows, its header."""
    names = [item.name for item in fields(kind)]
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(map(attrgetter(*names), rows))
    return out.getvalue().encode()


def whole_percent(share: float) -> str:
    """Return 0.382 as `38 %`."""
    return f"{100 * share:.0f} %"
