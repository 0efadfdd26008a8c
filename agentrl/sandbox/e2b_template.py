"""Templates of E2B built from a task's image, by E2B itself: no image passes through this host.

`python -m agentrl.sandbox.e2b_template MEMORY_MB DOMAIN OUT docker://IMAGE` builds one and writes
its name to OUT; DOMAIN may be empty. A program, so that `pull.ensure` runs it once for all nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox.e2b_sdk import is_refused_for_now, open_sdk

ENDING = ".template"


def name_of(reference: str) -> str:
    """Return the name of an image's template; letters, digits and dashes are all it may have."""
    return f"agentrl-{hashlib.sha256(reference.encode()).hexdigest()[:32]}"


async def build(reference: str, *, memory_mb: int, domain: str) -> str:
    """Have E2B build the template of `docker://IMAGE`; return its name."""
    sdk: Any = open_sdk(1)
    name = name_of(reference)
    template = sdk.AsyncTemplate().from_image(reference.removeprefix("docker://"))
    options = {"domain": domain} if domain else {}
    await sdk.AsyncTemplate.build(template, name, memory_mb=memory_mb, **options)
    return name


def main(argv: list[str]) -> int:
    memory_mb, domain, out, reference = argv
    try:
        name = asyncio.run(build(reference, memory_mb=int(memory_mb), domain=domain))
    except SandboxUnavailable as error:
        print(error)
        return 1
    except Exception as error:  # the SDK's kinds have no root of their own
        code = "429: " if is_refused_for_now(error) else ""
        print(f"{code}{type(error).__name__}: {error}")
        return 1
    Path(out).write_text(f"{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
