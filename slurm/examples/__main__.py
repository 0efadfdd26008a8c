"""`python -m slurm.examples`: write the examples anew, beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm.examples import examples


def main() -> int:
    for name, text in examples().items():
        path = Path(__file__).with_name(name)
        path.write_text(text)
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
