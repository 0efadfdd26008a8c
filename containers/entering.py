"""How a role's step enters the image: the exec line, whole, from a handful of facts. Pure.

`enter_script` returns the text that `bash -c TEXT role COMMAND …` runs on a node. It takes along
what CROSSING lets through, makes the node-local home, and becomes `apptainer exec`; there is no
shell left between srun and Apptainer, so that a signal to the step reaches the role.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agentrl.errors import ImageError

GPU_FLAGS: dict[str, tuple[str, ...]] = {"none": (), "rocm": ("--rocm",), "cuda": ("--nv",)}
"""--rocm brings /dev/kfd, /dev/dri and the driver's libraries, --nv NVIDIA's."""
CROSSING = {
    "SLURM_.*": "which job, step, node and rank this is",
    "SLURMD_NODENAME": "names exit records, and is looked up in the network's plan",
    "AGENTRL_.*": "ours: the mark by which a step's processes are found, a site's own roles",
    "PYTHONSAFEPATH": "import nothing from where a job happens to run",
    "(ROCR|HIP|CUDA)_VISIBLE_DEVICES": "Slurm's share of the GPUs; engines divide it",
    "GPU_DEVICE_ORDINAL": "the same, in OpenCL's words; unset for engines",
    "(NCCL|RCCL|GLOO|UCX)_.*": "a site's choice of network; ours is set inside, after proof",
    "FI_.*": "libfabric: Slingshot hangs without its cache monitor and queue sizes",
    "HSA_.*": "ROCm's runtime: XNACK, SDMA, the fine grain that RCCL wants over PCIe",
    "HIP_.*": "HIP's own switches, blocking launches while a fault is looked for among them",
    "MIOPEN_.*": "kernels compiled on a node: on its own disk, for these databases lock files",
    "(OMP|MKL)_NUM_THREADS": "threads of one process, which Slurm does not bound",
    "(HF|WANDB|E2B)_.*": "tokens and switches that configs name as ${oc.env:…}",
    "(http|https|no)_proxy": "the way out of a compute node, for E2B and W&B",
    "USER|TZ": "who owns caches, and logs in one time",
}
"""Variables of the host that a role sees, as patterns, each with its reason; all else stays out."""
INSIDE = {"PYTHONNOUSERSITE": "1"}
"""Set for every role: no packages of a home that is bound after all."""
HELD = 'trap "" USR2 TERM; exec "$@"'
"""Inside again, for Apptainer's runtime sets signals back: no death by one before it listens."""
HOME = '--home="$home"'
"""A word of the exec line that is bash already; enter_script sets the variable."""
SHIELD = (
    "fuse=$home/.fuse real=$(type -P squashfuse_ll)",
    'if [[ $real ]] && mkdir -p "$fuse"; then',
    """    printf '#!/bin/sh\\ntrap "" USR2 TERM\\nexec %q "$@"\\n' "$real" >"$fuse/.$$\"""",
    '    chmod +x "$fuse/.$$" && mv "$fuse/.$$" "$fuse/squashfuse_ll" && PATH=$fuse:$PATH',
    "fi",
)
"""Where Apptainer mounts the image by FUSE: Slurm may signal every process of a step, and without
its squashfuse_ll a role would lose the image while it saves."""
WIDTH = 98


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """What a role's exec line depends on."""

    image: str
    size: int = 0
    """Bytes of the image when the job was queued: later lives of the job refuse another file, which
    may have taken its name. 0 does not look."""
    gpu: str = "none"
    """A key of GPU_FLAGS: the image's own label."""
    folder: str
    """Working directory: the run's own folder."""
    binds: tuple[str, ...]
    """Paths of the host that are seen inside, as SRC, SRC:DST or SRC:DST:ro."""
    scratch: str = ""
    """Folder of a node's own that is the home inside; $NAME is expanded on the node."""
    crossing: tuple[str, ...] = ()
    """More variables that cross, by name: those that the site's config exports."""
    runtime: str = "apptainer"
    flags: tuple[str, ...] = ()
    """More flags of `exec`, the site's own."""

    def __post_init__(self) -> None:
        gpu_flags(self.gpu)
        for path in (self.image, self.folder, *self.binds):
            if not path.startswith("/"):
                raise ImageError(f"image, folder or bind {path!r}: must be an absolute path")
        for path in (self.folder, *self.binds):
            if "," in path:
                raise ImageError(f"bind {path!r}: Apptainer splits binds at commas; rename it")
        if ":" in self.folder:
            raise ImageError(f"folder {self.folder!r}: Apptainer splits binds at colons; rename it")
        for name in self.crossing:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ImageError(f"variable {name!r}: no name of a variable")


def enter_script(container: Container, mark: str) -> str:
    """Return bash's text that puts "$@" into the image; the same for the same arguments.

    mark: value of AGENTRL_ROLE_MARK, in which $NAME is expanded on the node.
    """
    prefix = "SINGULARITYENV_" if "singularity" in container.runtime else "APPTAINERENV_"
    home = container.scratch or "/tmp/agentrl-$UID"
    return "\n".join(
        [
            f"export AGENTRL_ROLE_MARK={mark}",
            'trap "" USR2 TERM',
            f"home={_expanded(home)}",
            'if ! mkdir -p -m 700 "$home" || ! [[ -O $home ]]; then',
            '    echo "scratch $home on $HOSTNAME: not a folder of yours; set cluster.scratch" >&2',
            "    exit 2",
            "fi",
            *_same_image(container),
            *SHIELD,
            *_broken("crosses=(", crossing_patterns(container), ")"),
            "for name in $(compgen -e); do",
            '    for pattern in "${crosses[@]}"; do',
            f'        [[ $name =~ ^($pattern)$ ]] && export "{prefix}$name=${{!name}}"',
            "    done",
            "done",
            *_broken("exec ", _quoted(exec_line(container)), ' role "$@"', joint=" \\"),
        ]
    )


def _same_image(container: Container) -> list[str]:
    """Return the refusal of another file under the image's name, by its size: a copy on a node's
    own disk has a time of its own, and to hash one takes a minute."""
    if not container.size:
        return []
    return [
        f"image={shlex.quote(container.image)}",
        f'if [[ $(stat -Lc %s "$image") != {container.size} ]]; then',
        '    echo "image $image on $HOSTNAME: not the file that this job was queued with" >&2',
        "    exit 2",
        "fi",
    ]


def exec_line(container: Container) -> list[str]:
    """Return the words up to the command; HOME is the node-local home, still to be expanded."""
    return [
        *(container.runtime, "exec", "--cleanenv", *gpu_flags(container.gpu), *container.flags),
        *("--no-mount=home,cwd", HOME, f"--pwd={container.folder}"),
        *(f"--env={name}={value}" for name, value in INSIDE.items()),
        *(f"--bind={bind}" for bind in distinct(container.binds)),
        *(container.image, "bash", "-c", HELD),
    ]


def gpu_flags(kind: str) -> tuple[str, ...]:
    """Return what makes GPUs visible in an image of that kind. Raises ImageError."""
    if kind not in GPU_FLAGS:
        raise ImageError(f"label agentrl.gpu {kind!r}: must be one of {', '.join(GPU_FLAGS)}")
    return GPU_FLAGS[kind]


def crossing_patterns(container: Container) -> list[str]:
    """Return the patterns of variables that cross into this image, as words of bash."""
    named = [name for name in container.crossing if not crosses(name)]
    return [shlex.quote(pattern) for pattern in [*CROSSING, *named]]


def crosses(name: str, patterns: Iterable[str] = CROSSING) -> bool:
    """Whether a variable of the host is seen inside."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def distinct(binds: Sequence[str]) -> list[str]:
    """Return binds without those that another one brings along anyway."""
    plain = [PurePosixPath(bind) for bind in binds if ":" not in bind]
    return [
        bind
        for bind in dict.fromkeys(binds)
        if ":" in bind or not any(other in PurePosixPath(bind).parents for other in plain)
    ]


def link_targets(folder: Path) -> list[str]:
    """Return the folders outside `folder` that links in it lead to, as a hub cache's blobs."""
    found = (path.resolve().parent for path in sorted(folder.rglob("*")) if path.is_symlink())
    outside = {target for target in found if folder.resolve() not in (target, *target.parents)}
    return sorted(map(str, outside))


def _expanded(text: str) -> str:
    """Quote for bash so that $NAME alone is expanded."""
    return '"' + re.sub(r'([\\"`]|\$(?!\w|\{\w+\}))', r"\\\1", text) + '"'


def _quoted(words: Iterable[str]) -> list[str]:
    return [word if word == HOME else shlex.quote(word) for word in words]


def _broken(head: str, words: Sequence[str], tail: str, *, joint: str = "") -> list[str]:
    """Return head, words and tail as lines of WIDTH at most, where words allow it."""
    lines = [head]
    for word in words:
        if len(lines[-1]) + len(word) + 1 + len(joint) > WIDTH and lines[-1].strip():
            lines[-1] = lines[-1].rstrip() + joint
            lines.append("    ")
        lines[-1] += word + " "
    lines[-1] = lines[-1].rstrip()
    if len(lines[-1]) + len(tail) > WIDTH:
        lines[-1] += joint
        lines.append("   " if tail.startswith(" ") else "")
    lines[-1] += tail
    return lines
