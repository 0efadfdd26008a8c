"""A figure's numbers as a CSV beside it: one row a dataclass, columns by field name."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.handoff.publish import publish_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def write_csv(rows: Sequence[DataclassInstance], path: Path) -> None:
    """Write `rows`, all of one kind; no row gives an empty file."""
    out = StringIO()
    if rows:
        writer = csv.DictWriter(out, [item.name for item in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    publish_bytes(path, out.getvalue().encode())


def whole_percent(share: float) -> str:
    """Return 0.382 as `38 %`."""
    return f"{100 * share:.0f} %"
