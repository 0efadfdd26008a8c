"""How long `docker run -d` takes here, of a root folder that holds nothing but `sleep`."""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

IMAGE = "agentrl-benchmark:latest"


def docker_starts(count: int, at_a_time: int) -> tuple[list[float], str]:
    """Start `count` containers, all left alive until the last is; return seconds, or why none.

    Seconds are those until `docker run -d` returns: its command runs then. Nothing is left.
    """
    names = [f"agentrl-benchmark-{number}" for number in range(count)]
    try:
        _docker("import", "-", IMAGE, given=_root())
        with ThreadPoolExecutor(at_a_time) as pool:
            return list(pool.map(_seconds, names)), ""
    except (OSError, subprocess.CalledProcessError) as error:
        return [], (getattr(error, "stderr", b"") or b"").decode().strip()[-200:] or str(error)
    finally:
        for words in (["rm", "-f", *names], ["rmi", IMAGE]):
            subprocess.run(["docker", *words], capture_output=True, check=False)


def _seconds(name: str) -> float:
    begin = time.perf_counter()
    _docker("run", "-d", "--name", name, "--network", "none", IMAGE, "/sleep", "600")
    return time.perf_counter() - begin


def _docker(*words: str, given: bytes = b"") -> None:
    subprocess.run(["docker", *words], input=given, capture_output=True, check=True)


def _root() -> bytes:
    """Return a tar of `sleep` and the libraries that it is linked with."""
    said = subprocess.run(["ldd", "/bin/sleep"], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in said.split() if word.startswith("/")}
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", dereference=True) as tar:
        tar.add("/bin/sleep", arcname="sleep")
        for path in sorted(libraries):
            tar.add(Path(path).resolve(), arcname=path.lstrip("/"))
    return data.getvalue()
