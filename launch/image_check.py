"""What a role needs, tried where this runs: in an image on a node, or in the Python at hand.

Nothing here is looked up and believed: modules are imported, a kernel runs on each GPU, bytes go
through NCCL or RCCL, a sandbox starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launch.findings import Finding, fail, looked, ok, skip, warn

ROLES = {
    "trainer": ("agentrl.training.loop", "agentrl.training.torch_backend", "launch.role"),
    "inference": ("agentrl.rollout.node", "agentrl.engine.server", "launch.role"),
}
OPTIONAL = {"sglang": "engine.kind=sglang", "megatron.core": "the Megatron back end"}
VERSIONS_OF = ("agentrl-slurm", "torch", "transformers", "sglang", "megatron-core", "triton")
ROCM_OLD = (7, 2, 2)
ROCM_CORRUPT = ((7, 2, 0), (7, 2, 3))
"""Releases, both included, of which ROCm/clr#279 tells corrupt output on MI300X."""
LOCKED_LEAST_GB = 1
OPEN_LEAST = 4096
COLLECTIVE = Path(__file__).with_name("image_collective.py")
COLLECTIVE_S = 180.0


def findings(*, is_quick: bool = False) -> Iterator[Finding]:
    """Yield what was found, as it is; is_quick: without what takes over ten seconds."""
    yield from looked("python", python)
    yield from looked("versions", versions)
    for role in ROLES:
        yield from looked(role, partial(imports, role))
    for name, use in OPTIONAL.items():
        yield from looked(name, partial(optional, name, use))
    yield from looked("rocm", rocm)
    yield from looked("gpus", gpus)
    yield from looked("kernels", kernels)
    if is_quick:
        yield skip("collective", "left out by --quick, and tokens and steps")
    else:
        yield from looked("collective", collective)
        yield from looked("roles", tried)
    yield from looked("checkpoint", checkpoint)
    yield from looked("sandbox", sandbox)
    yield from looked("limits", limits)
    yield from looked("folders", folders)


def python() -> Finding:
    where = os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER")
    text = f"{platform.python_version()}, {sys.executable}, {where or 'in no image'}"
    leaks = [path for path in sys.path if "/.local/lib/" in path]
    if leaks:
        return fail("python", f"{text}; imports from {leaks[0]}", "set PYTHONNOUSERSITE=1")
    return ok("python", text)


def versions() -> Finding:
    found = {name: _version(name) for name in VERSIONS_OF}
    return ok("versions", ", ".join(f"{name} {what or '-'}" for name, what in found.items()))


def imports(role: str) -> Finding:
    """Import what a role imports; a library that is missing is named by what this raises."""
    began = time.monotonic()
    for name in ROLES[role]:
        importlib.import_module(name)
    return ok(role, f"{', '.join(ROLES[role])} in {time.monotonic() - began:.1f} s")


def optional(name: str, use: str) -> Finding:
    """Import what an image may lack; one that is there but does not import is a failure."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return skip(name, f"not in here: no {use}")
    importlib.import_module(name)
    return ok(name, f"imported, for {use}")


def rocm() -> Finding:
    """Tell ROCm's exact version, and what is known of it."""
    text = rocm_version()
    if not text:
        return skip("rocm", "no ROCm in here")
    return rocm_verdict(text)


def rocm_version() -> str:
    for folder in (os.environ.get("ROCM_PATH", "/opt/rocm"), "/opt/rocm"):
        path = Path(folder, ".info", "version")
        if path.is_file():
            return path.read_text().strip()
    torch = importlib.import_module("torch")
    return str(torch.version.hip or "")


def rocm_verdict(text: str) -> Finding:
    """Judge a version as `7.2.4-70` by what is known of its release."""
    found = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
    if found < ROCM_OLD:
        return warn(
            "rocm",
            text,
            "before 7.2.2 a scheduler can abort while it captures graphs (hipEventQuery, "
            "sglang#23580): build on 7.2.4, or run without graphs",
        )
    if ROCM_CORRUPT[0] <= found <= ROCM_CORRUPT[1]:
        return warn("rocm", text, "7.2.0 to 7.2.3 may corrupt output unseen (ROCm/clr#279): 7.2.4")
    return ok("rocm", text)


def gpus() -> Iterator[Finding]:
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count()
    is_wanted = Path("/dev/kfd").exists() or Path("/dev/nvidiactl").exists()
    if not count:
        if is_wanted:
            yield fail(
                "gpus",
                f"none visible to torch {torch.__version__}, and the node has a driver",
                "is the image entered with --rocm or --nv, are you in the groups video and "
                "render, does one mask (ROCR_ or CUDA_VISIBLE_DEVICES) hide them?",
            )
        else:
            yield skip("gpus", "none here")
        return
    names = sorted({torch.cuda.get_device_name(at) for at in range(count)})
    free = min(torch.cuda.mem_get_info(at)[0] / 2**30 for at in range(count))
    total = torch.cuda.mem_get_info(0)[1] / 2**30
    text = f"{count} × {', '.join(names)}, {free:.0f} of {total:.0f} GiB free on the fullest"
    if len(names) > 1 or free < 0.9 * total:
        yield warn("gpus", text, "another process holds memory, or the node mixes GPUs")
    else:
        yield ok("gpus", text)


def kernels() -> Finding:
    """Multiply on each GPU and compare with the CPU: one that answers wrongly is found here."""
    torch = importlib.import_module("torch")
    if not torch.cuda.device_count():
        return skip("kernels", "no GPU")
    left = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    wanted, began = left @ left, time.monotonic()
    for at in range(torch.cuda.device_count()):
        found = (left.to(f"cuda:{at}") @ left.to(f"cuda:{at}")).cpu()
        gap = float((found - wanted).abs().max())
        if gap > 0.5:  # TF32 keeps ten bits of 512 products
            return fail("kernels", f"GPU {at} is off by {gap:.3g}", "take the node out of use")
    return ok("kernels", f"right on each, {time.monotonic() - began:.1f} s")


def collective() -> Finding:
    """Sum over all GPUs of this node by NCCL or RCCL; without any, over two processes by gloo."""
    torch = importlib.import_module("torch")
    count = torch.cuda.device_count()
    backend, size = ("nccl", count) if count > 1 else ("gloo", 2)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(COLLECTIVE), backend, str(size), f"{folder}/store"]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=COLLECTIVE_S, check=False
        )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return fail("collective", f"{backend} over {size}: {said}", "NCCL_DEBUG=INFO tells more")
    return ok("collective", f"{backend} over {size} in {time.monotonic() - began:.1f} s")


def tried() -> Iterator[Finding]:
    """Sample one token with each engine and take one step with each trainer that is in here."""
    return importlib.import_module("launch.image_try").findings()  # type: ignore[no-any-return]


def checkpoint() -> Finding:
    """Write tensors and read them back, bit for bit."""
    torch = importlib.import_module("torch")
    files = importlib.import_module("safetensors.torch")
    made = {"weight": torch.arange(1024, dtype=torch.bfloat16)}
    with tempfile.TemporaryDirectory() as folder:
        files.save_file(made, f"{folder}/a.safetensors")
        found = files.load_file(f"{folder}/a.safetensors")
    if not torch.equal(found["weight"], made["weight"]):
        return fail("checkpoint", "what was read is not what was written", "build the image again")
    return ok("checkpoint", "safetensors written and read back")


def sandbox() -> Finding:
    """Start one empty sandbox of bubblewrap: whether sandboxes can be nested in the image."""
    from agentrl.errors import SandboxUnavailable
    from agentrl.sandbox.bubblewrap import inside_python, probe

    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return warn("sandbox", "no bwrap in here", "sandbox.kind=e2b needs none; else add it")
    began = time.monotonic()
    try:
        probe(bwrap, tuple(inside_python("/usr/bin/python3")[1]))
    except SandboxUnavailable as error:
        return fail("sandbox", str(error), "sandboxes of another kind: see docs/containers.md")
    return ok("sandbox", f"bubblewrap starts one in {time.monotonic() - began:.2f} s")


def limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = f"{files} open files"
    if files < OPEN_LEAST:
        yield warn("limits", text, f"raise it to {OPEN_LEAST} or more: ulimit -n")
    else:
        yield ok("limits", text)
    if locked != resource.RLIM_INFINITY and locked < LOCKED_LEAST_GB << 30:
        has_rdma = Path("/sys/class/infiniband").is_dir()
        advice = "RDMA registers memory: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        found = f"{locked >> 10} KiB of locked memory"
        yield warn("limits", found, advice) if has_rdma else ok("limits", f"{found}, no RDMA here")


def folders() -> Iterator[Finding]:
    shared = shutil.disk_usage("/dev/shm").total / 2**30
    if shared < 1:
        yield warn("folders", f"/dev/shm {shared:.2f} GiB", "NCCL needs 1 GiB or more there")
    else:
        yield ok("folders", f"/dev/shm {shared:.0f} GiB")
    home = Path.home()
    if not os.access(home, os.W_OK):
        yield warn("folders", f"home {home} is read-only", "kernels that compile need it: --home")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
