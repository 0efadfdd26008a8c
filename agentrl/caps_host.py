"""Reads what this node allows, for `caps`: limits of the process, its control group, the kernel."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from agentrl.caps import UNBOUNDED, Host, ModelShape
from agentrl.config import RunConfig
from agentrl.sandbox.limits import scratch_folder

GPU_TOOLS = (
    ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"),
    ("rocm-smi", "--showmeminfo", "vram", "--json"),
)


def probe(config: RunConfig) -> Host:
    """Return what this machine allows now."""
    low, high = (int(word) for word in _read("/proc/sys/net/ipv4/ip_local_port_range").split())
    threads = min(_number("/proc/sys/kernel/pid_max"), _number("/proc/sys/kernel/threads-max"))
    scratch = scratch_folder(config.sandbox)
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return Host(
        open_files=_bound(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        processes=min(_bound(soft), cgroup_limit("pids", "pids.max", "pids.max")),
        process_ids=threads,
        namespaces=_number("/proc/sys/user/max_user_namespaces"),
        ports=high - low + 1,
        memory_mb=free_memory_mb(),
        scratch_mb=shutil.disk_usage(_existing(scratch)).free >> 20,
        is_scratch_in_memory=file_system(scratch) in ("tmpfs", "ramfs"),
        run_disk_mb=shutil.disk_usage(_existing(Path(config.runs_dir))).free >> 20,
        inotify=_number("/proc/sys/fs/inotify/max_user_instances"),
        fuse_mounts=_fuse_mounts(Path("/etc/fuse.conf")),
        loop_devices=_number("/sys/module/loop/parameters/max_loop") or UNBOUNDED,
        gpu_memory_mb=gpu_memory_mb(),
        is_root=os.geteuid() == 0,
    )


def free_memory_mb() -> int:
    """Return what this process may take of the machine's memory, MiB, its group's limit at most."""
    limit = cgroup_limit("memory", "memory.limit_in_bytes", "memory.max")
    return min(psutil.virtual_memory().available, limit) >> 20


def model_shape(folder: Path) -> ModelShape | None:
    """Return the shape of a model's folder; None while it is not made, or tells none."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_bytes())
    if "num_attention_heads" not in config.get("text_config", config):
        return None
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return ModelShape.of(config, weights_mb=weights >> 20)


def cgroup_limit(controller: str, v1: str, v2: str, *, root: Path = Path("/")) -> int:
    """Return the lowest limit of this process's control group and of those above it."""
    found = [UNBOUNDED]
    for folder, top, name in _groups(controller, v1, v2, root):
        for group in (folder, *folder.parents):
            if (group / name).is_file():
                text = (group / name).read_text().strip()
                found.append(UNBOUNDED if text == "max" else int(text))
            if group == top:
                break
    return min(found)


def file_system(folder: Path, *, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the kind of file system that a folder is on, as `tmpfs`; '' where it can't be told."""
    where = _existing(folder.resolve())
    lines = [line.split()[1:3] for line in _read(str(mounts)).splitlines()]
    above = [(place, kind) for place, kind in lines if where.is_relative_to(place)]
    return max(reversed(above), key=lambda found: len(found[0]), default=("", ""))[1]


def gpu_memory_mb() -> int:
    """Return the memory of the smallest GPU here, MiB; 0 without a tool that sees one."""
    for tool, *words in GPU_TOOLS:
        if shutil.which(tool) is None:
            continue
        done = subprocess.run(
            [tool, *words], capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode == 0 and (sizes := parse_gpu_memory(done.stdout)):
            return min(sizes)
    return 0


def parse_gpu_memory(text: str) -> list[int]:
    """Read MiB a line (nvidia-smi), or JSON with `VRAM Total Memory (B)` (rocm-smi)."""
    totals = re.findall(r'VRAM Total Memory \(B\)": *"(\d+)"', text)
    if totals:
        return [int(total) >> 20 for total in totals]
    return [int(line) for line in text.split() if line.isdigit()]


def _groups(controller: str, v1: str, v2: str, root: Path) -> Iterator[tuple[Path, Path, str]]:
    """Yield (this process's group, the hierarchy's top, name of the limit's file)."""
    path = root / "proc/self/cgroup"
    for line in path.read_text().splitlines() if path.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", v2
        elif controller in controllers.split(","):
            top, name = root / "sys/fs/cgroup" / controller, v1
        else:
            continue
        yield top / group.lstrip("/"), top, name


def _fuse_mounts(path: Path) -> int:
    """Return mount_max, whose default is 1000. Source: fuse.conf(5)."""
    found = re.findall(r"^\s*mount_max\s*=\s*(\d+)", _read(str(path)), re.MULTILINE)
    return int(found[-1]) if found else 1000


def _existing(path: Path) -> Path:
    """Return `path`, or the first folder above it that is there."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def _bound(value: int) -> int:
    return UNBOUNDED if value == resource.RLIM_INFINITY else value


def _number(path: str) -> int:
    return int(_read(path) or UNBOUNDED)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except FileNotFoundError:
        return ""
