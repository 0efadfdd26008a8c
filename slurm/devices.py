"""Which GPUs and ports each engine of a node has: pure, so that no two can share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.errors import ConfigError

Vendor = Literal["nvidia", "amd", "none"]
LOWEST_PORT, HIGHEST_PORT = 1024, 65535
"""Below 1024 a port needs privilege (IANA's system ports, RFC 6335)."""
FIRST_PORT = 20000
EPHEMERAL = (32768, 60999)
"""Linux's default net.ipv4.ip_local_port_range, from which the kernel gives any port to anybody."""
PORTS_PER_ENGINE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDevices:
    """One engine's share of its node."""

    engine: int
    gpus: tuple[str, ...]
    """As the node's own mask names them: an index or a UUID."""
    environment: dict[str, str]
    ports: range


def engine_devices(
    gpus: int,
    engines: int,
    gpus_per_engine: int,
    vendor: Vendor,
    *,
    visible: Sequence[str] | None = None,
    first_port: int | None = None,
    ports_per_engine: int = PORTS_PER_ENGINE,
    ephemeral: tuple[int, int] = EPHEMERAL,
) -> tuple[EngineDevices, ...]:
    """Divide `gpus` and a range of ports among `engines`; the same answer each time it is asked.

    visible: what Slurm's mask already leaves this step (`granted` reads it), `gpus` of them; all,
    0..gpus-1, if there is none. Its entries are handed on word for word. With cgroups
    (ConstrainDevices) Slurm numbers them from 0 among the step's own devices, without cgroups
    among the node's: either way they are what the driver of a process of this step understands,
    so they must be divided and never renumbered.

    nvidia: CUDA_VISIBLE_DEVICES is the engine's share. amd: ROCR_VISIBLE_DEVICES is the share,
    and HIP counts within what ROCr left, so HIP_VISIBLE_DEVICES is 0..k-1; so is
    CUDA_VISIBLE_DEVICES, which HIP reads too. A value of the node's mask left in either would
    point past the end (Parsl#3858 "No HIP GPUs are available", laifs-container-recipes#13,
    ROCR-Runtime#155). All other masks must leave the environment (`foreign_masks`).

    Ports: engine i has `ports_per_engine` from first_port + i · ports_per_engine, whoever else
    runs, none of them in the `ephemeral` range (both ends included). Without `first_port`:
    20000 if that fits, else the lowest that does. Raises ConfigError.
    """
    _check(gpus, engines, gpus_per_engine, vendor)
    names = tuple(visible) if visible is not None else tuple(str(at) for at in range(gpus))
    if len(names) != gpus or len(set(names)) != gpus:
        raise ConfigError(
            f"gpus={gpus}: the mask of this step is {','.join(names) or 'empty'}; it must name "
            f"{gpus} different devices: ask Slurm for as many as the config says"
        )
    start = port_start(engines * ports_per_engine, first_port=first_port, ephemeral=ephemeral)
    return tuple(
        EngineDevices(
            engine=at,
            gpus=share,
            environment=mask(share, vendor),
            ports=range(start + at * ports_per_engine, start + (at + 1) * ports_per_engine),
        )
        for at in range(engines)
        for share in [names[at * gpus_per_engine : (at + 1) * gpus_per_engine]]
    )


def _check(gpus: int, engines: int, gpus_per_engine: int, vendor: Vendor) -> None:
    if engines < 1 or gpus < 0 or gpus_per_engine < 0:
        raise ConfigError(
            f"engines={engines}, gpus={gpus}, gpus_per_engine={gpus_per_engine}: "
            "engines must be 1 or more, the others not negative"
        )
    if (vendor == "none") != (gpus_per_engine == 0):
        raise ConfigError(
            f"gpus_per_engine={gpus_per_engine} with vendor={vendor!r}: an engine without a GPU "
            "has vendor none and gpus_per_engine=0, any other has at least one"
        )
    if engines * gpus_per_engine > gpus:
        raise ConfigError(
            f"engines={engines} of gpus_per_engine={gpus_per_engine} need "
            f"{engines * gpus_per_engine} GPUs a node, and it has {gpus}; lower one of the two"
        )


def mask(share: Sequence[str], vendor: Vendor) -> dict[str, str]:
    """Return the variables that leave a process just these GPUs."""
    listed = ",".join(share)
    if vendor == "nvidia":
        return {"CUDA_VISIBLE_DEVICES": listed}
    if vendor == "amd":
        within = ",".join(str(at) for at in range(len(share)))
        return {
            "ROCR_VISIBLE_DEVICES": listed,
            "HIP_VISIBLE_DEVICES": within,
            "CUDA_VISIBLE_DEVICES": within,
        }
    return {}


def foreign_masks(vendor: Vendor) -> tuple[str, ...]:
    """Return the masks of a parent that would act on top of `mask`: unset them for an engine."""
    others = ("GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
    if vendor == "nvidia":
        return (*others, "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return others if vendor == "amd" else ()


def granted(environment: Mapping[str, str], vendor: Vendor) -> tuple[str, ...] | None:
    """Return the devices that the masks of `environment` leave, None if there is no mask.

    On AMD HIP's mask counts within ROCr's. Slurm may set both to the same list of the node's
    numbers; then they say the same thing twice, and ROCr's is meant.
    """
    if vendor == "none":
        return None
    cuda = _entries(environment.get("CUDA_VISIBLE_DEVICES"))
    if vendor == "nvidia":
        return cuda
    rocr = _entries(environment.get("ROCR_VISIBLE_DEVICES"))
    hip = _entries(environment.get("HIP_VISIBLE_DEVICES"))
    hip = cuda if hip is None else hip
    if rocr is None or hip is None:
        return hip if rocr is None else rocr
    if rocr == hip:
        return rocr
    try:
        return tuple(rocr[int(at)] for at in hip)
    except (IndexError, ValueError) as error:
        raise ConfigError(
            f"ROCR_VISIBLE_DEVICES={','.join(rocr)} and HIP_VISIBLE_DEVICES={','.join(hip)}: the "
            "second counts within the first and points past its end; unset one of them"
        ) from error


def _entries(value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(entry.strip() for entry in value.split(",") if entry.strip())


def port_start(count: int, *, first_port: int | None, ephemeral: tuple[int, int]) -> int:
    """Return the first of `count` ports in a row that the kernel gives to nobody else."""
    low, high = ephemeral
    if first_port is not None:
        if _is_free(first_port, count, ephemeral):
            return first_port
        raise ConfigError(
            f"first_port={first_port}: {count} ports from there leave {LOWEST_PORT}-{HIGHEST_PORT} "
            f"or meet the ephemeral range {low}-{high}; choose another"
        )
    for start in (FIRST_PORT, LOWEST_PORT, high + 1):
        if _is_free(start, count, ephemeral):
            return start
    raise ConfigError(
        f"{count} ports for engines: no room beside the ephemeral range {low}-{high}; fewer "
        "engines, or narrow net.ipv4.ip_local_port_range"
    )


def _is_free(start: int, count: int, ephemeral: tuple[int, int]) -> bool:
    end = start + count - 1
    is_allowed = start >= LOWEST_PORT and end <= HIGHEST_PORT
    return is_allowed and (end < ephemeral[0] or start > ephemeral[1])
