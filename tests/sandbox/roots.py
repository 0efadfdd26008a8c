"""A small root folder for containers, copied from this host's own programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PROGRAMS = """
sh bash env cat cp echo false grep head id ls mkdir mkfifo nohup ps pgrep printf prlimit rm sed
seq setsid sleep stat tail touch tr true wc yes ln mv chmod chown du git python3 timeout tee
find mktemp mount umount unshare hostname kill cut nice taskset chrt chroot
""".split()  # noqa: SIM905 - a long list reads better as words
LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "__pycache__", "config-*"
)


def make_root(root: Path) -> Path:
    """Lay a root folder with a shell, coreutils, git and the system's Python (about 80 MB)."""
    for name in ("proc", "sys", "dev", "tmp", "root", "etc", "usr/bin", "usr/lib", "var/tmp"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to("usr/bin" if name == "bin" else "usr/lib")
    found = [path for name in PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin"))]
    for program in found:
        real = Path(program).resolve()
        shutil.copy2(real, root / "usr/bin" / Path(program).name)
    (root / "usr/bin/python").symlink_to("python3")
    found += map(str, Path("/usr/lib").glob("python3.*/lib-dynload/_ctypes.*.so"))
    done = subprocess.run(["ldd", *found], capture_output=True, text=True, check=False)
    words = {word for line in done.stdout.splitlines() for word in line.split()}
    for library in sorted(
        word for word in words if word.startswith("/") and not word.endswith(":")
    ):
        shutil.copy2(Path(library).resolve(), root / "usr/lib" / Path(library).name)
    for stdlib in Path("/usr/lib").glob("python3.*"):
        shutil.copytree(stdlib, root / "usr/lib" / stdlib.name, ignore=LEFT_OUT, symlinks=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    return root
