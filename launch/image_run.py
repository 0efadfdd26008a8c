"""The image of a run: what its roles see of the host, proof that they start in it, and its digest.

A run keeps the image that it began with: other kernels give other numbers. image.json in its
directory has the digest; another image is taken only by `--accept-image-change`.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import msgspec

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, ImageError, RecordError
from agentrl.handoff.publish import publish_bytes
from containers import sif
from containers.entering import Container, link_targets
from launch.run_dir import RunDir

FILE = "image.json"
ROLES = "launch.roles"
IMPORTED = ("agentrl.training.loop", "agentrl.rollout.node")
"""What our own roles import once they play; a site's own module is imported itself."""
PROOF_S = 600.0


class ImageRecord(msgspec.Struct, kw_only=True, frozen=True):
    """image.json: the image that a run's roles run in."""

    path: str
    digest: str
    size: int
    mtime_ns: int
    labels: dict[str, str]
    definition: str
    """Text of the definition file."""
    is_proved: bool = False
    """Whether what the roles import was imported in it, on the machine that submitted."""


def container_of(config: RunConfig, run: RunDir) -> Container | None:
    """Return how a role of this run enters its image, None where it has none. Raises ImageError."""
    if not config.image:
        return None
    image, model = sif.read(Path(config.image)), Path(config.model.path)
    folders = [run.path, model, Path(config.tasks.folder), Path(config.agent.prompts).parent]
    found = [str(folder) for folder in folders if folder.exists() or folder == run.path]
    return Container(
        image=config.image,
        size=image.size,
        gpu=image.gpu,
        folder=str(run.path),
        binds=(*found, *link_targets(model), *config.cluster.binds),
        scratch=config.cluster.scratch,
        crossing=tuple(config.cluster.environment),
        runtime=config.cluster.runtime,
        flags=tuple(config.cluster.runtime_flags),
    )


def checked(config: RunConfig, run: RunDir) -> ImageRecord | None:
    """Return what the run's image is, None where it has none.

    Raises ImageError for an image that is not whole, is of another kind of machine, or in which
    the roles' imports fail; what this run has proved already is not proved again.
    """
    if not config.image:
        return None
    if not config.cluster.is_slurm:
        raise ConfigError(
            f"image={config.image} with cluster=local: here the roles are processes of this "
            "machine; give cluster=NAME, or leave image empty"
        )
    path = Path(config.image)
    image = sif.read(path)
    sif.refuse_foreign(image)
    before = recorded(run)
    stat = path.stat()
    same = before and (before.size, before.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    record = ImageRecord(
        path=str(path),
        digest=before.digest if before and same else sif.digest(path),
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        labels=image.labels,
        definition=image.definition,
    )
    if before and before.is_proved and before.digest == record.digest:
        return msgspec.structs.replace(record, is_proved=True)
    return msgspec.structs.replace(record, is_proved=prove(config))


def record(run: RunDir, image: ImageRecord | None, *, accept_change: bool = False) -> None:
    """Write image.json. Raises ImageError if the run began in another image."""
    before = recorded(run)
    if before and (image is None or image.digest != before.digest) and not accept_change:
        now = f"{image.path} is {image.digest[:19]}…" if image else "image is empty"
        raise ImageError(
            f"run {run.path}: began in {before.path} ({before.digest[:19]}…), and {now}: other "
            f"software may give other numbers; `agentrl resume {run.path} --accept-image-change` "
            "takes it"
        )
    if image:
        data = msgspec.json.format(msgspec.json.encode(image), indent=1)
        publish_bytes(run.path / FILE, data + b"\n")


def recorded(run: RunDir) -> ImageRecord | None:
    """Return what image.json holds, None where there is none."""
    path = run.path / FILE
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=ImageRecord)
    except msgspec.DecodeError as error:
        raise RecordError(f"{path}: not readable: {error}; is it edited?") from error


def roles_of(config: RunConfig) -> str:
    """Return the module whose functions the roles play."""
    return config.cluster.environment.get("AGENTRL_ROLES", ROLES)


def imports_of(config: RunConfig) -> str:
    """Return the statement that imports what this run's roles import."""
    roles = roles_of(config)
    names = ("launch.role", roles, *(IMPORTED if roles == ROLES else ()))
    return f"import {', '.join(names)}"


def prove(config: RunConfig) -> bool:
    """Import in the image what the roles import; return False where no runtime is here to ask.

    Raises ImageError in the image's own words.
    """
    cluster, statement = config.cluster, imports_of(config)
    runtime = shutil.which(cluster.runtime)
    if runtime is None:
        return False
    words = [runtime, "exec", "--cleanenv", *cluster.runtime_flags, "--no-mount=home,cwd"]
    words += ["--env=PYTHONNOUSERSITE=1", "--pwd=/", *_binds(cluster.binds)]
    extra = cluster.environment.get("PYTHONPATH", "")
    words += [f"--env=PYTHONPATH={extra}"] if extra else []
    try:
        done = subprocess.run(
            [*words, config.image, "python3", "-c", statement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PROOF_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ImageError(
            f"image {config.image}: its imports took over {PROOF_S:g} s on {platform.node()}"
        ) from error
    if done.returncode:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no word"]
        raise ImageError(
            f"image {config.image}: no role can start in it: {said[-1].strip()} (exit code "
            f"{done.returncode} of `{statement}`); build it again, "
            f"`agentrl image check {config.image}` shows more"
        )
    return True


def facts(image: ImageRecord | None) -> dict[str, object] | None:
    """Return what goes into a run's provenance."""
    if image is None:
        return None
    return {"path": image.path, "digest": image.digest, "labels": image.labels}


def _binds(binds: list[str]) -> list[str]:
    return [f"--bind={bind}" for bind in binds if Path(bind.partition(":")[0]).exists()]
