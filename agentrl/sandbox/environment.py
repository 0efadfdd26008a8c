"""What a sandbox of the container kinds starts from, by the task's image folder and the config.

An image folder holds `testbed`, the repository, or a file `environment` whose one line names where
the repository is inside already (at /testbed), or both. What the line names is the kind's own: a
SIF or root folder, an image's reference, a template.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import SandboxStartError
from agentrl.sandbox.bubblewrap import ENVIRONMENT
from agentrl.sandbox.resident import TAKE

PARTS = ("frames", "bounded", "confine", "enclose", "executor")
PYTHONS = "python3 /usr/bin/python3 /opt/miniconda3/bin/python3 /opt/conda/bin/python3"
ONCE_PARTS = ("frames", "bounded", "confine", "executor", "once")
START = (
    f'for p in {PYTHONS}; do "$p" -I -S -c "import os; os.pidfd_open" 2>/dev/null && '
    'exec "$p" -I -S -c "$0" "$@"; done; '
    'echo "the environment has no Python 3.9 or newer; looked for: '
    f'{PYTHONS}" >&2; exit 1'
)
"""Finds the environment's Python, whose version nobody knows before."""
PREPARE = (
    f'for p in {PYTHONS}; do "$p" -I -S -c "$0" "$@" && echo "$p" && exit; done; '
    f'echo "the environment has no Python 3.9 or newer; looked for: {PYTHONS}" >&2; exit 1'
)
LOADER = f"""\
import os, sys
{TAKE}exec(take(int.from_bytes(take(4), "big")).decode())
"""
"""Runs the executor from its stdin."""
COMPILE = """\
import ast, marshal, os, sys
os.pidfd_open
parts = ast.literal_eval(open(sys.argv[1]).read())
marshal.dump([(p, compile(t, p, "exec", optimize=2)) for p, t in parts], open(sys.argv[2], "wb"))
"""
ONCE = """\
import marshal, sys
for name, code in marshal.load(open(sys.argv[1], "rb")):
    module = sys.modules["agentrl.sandbox." + name] = type(sys)(name)
    exec(code, module.__dict__)
module.main(sys.argv[2:])
"""
"""Runs the executor for one request from the file that COMPILE made."""
VARIABLES = {name: value for name, value in ENVIRONMENT.items() if name not in ("PATH", "HOME")} | {
    "HOME": "/root",
    "TMPDIR": "/tmp",
}
"""Set for commands; PATH stays the environment's own."""


def environment_of(image: Path, default: str) -> str:
    """Return what `image` starts from. Raises SandboxStartError."""
    named = image / "environment"
    found = named.read_text().strip() if named.is_file() else default
    if not found:
        raise SandboxStartError(
            f"image {image} has no file `environment` and sandbox.environment is empty: "
            "name a SIF, an image's reference or a template in one of them"
        )
    if not (image / "testbed").is_dir() and not named.is_file():
        raise SandboxStartError(
            f"image {image} has no folder `testbed` and no file `environment`; prepare it first"
        )
    return found


def first_command(*numbers: int, shell: str) -> list[str]:
    """Return the command that becomes the executor inside, once it is sent `executor_source`."""
    return ["/bin/sh", "-c", START, LOADER, "container", shell, *map(str, numbers)]


def once_source() -> bytes:
    """Return the parts of the executor for one request, to be compiled inside by `COMPILE`."""
    return repr(sources(ONCE_PARTS)).encode()


def executor_source() -> bytes:
    """Return the executor for LOADER as source, for a Python of whatever version."""
    program = (
        f"for name, text in {sources(PARTS)!r}:\n"
        "    module = sys.modules['agentrl.sandbox.' + name] = type(sys)(name)\n"
        "    exec(compile(text, name, 'exec'), module.__dict__)\n"
        "module.main(sys.argv[1:])\n"
    ).encode()
    return len(program).to_bytes(4, "big") + program


def sources(parts: tuple[str, ...]) -> list[tuple[str, str]]:
    folder = Path(__file__).parent
    return [(name, (folder / f"{name}.py").read_text()) for name in parts]
