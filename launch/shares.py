"""How an inference role of a job divides its node's GPUs and ports among its engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.config import EngineConfig
from agentrl.engine.devices import EngineShare
from slurm.devices import EPHEMERAL, Vendor, engine_devices, granted

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DRIVERS: dict[Vendor, Path] = {"amd": Path("/dev/kfd"), "nvidia": Path("/dev/nvidiactl")}
"""What the vendor's driver leaves on a node with GPUs."""


def shares_of(
    engine: EngineConfig, environ: Mapping[str, str], *, vendor: Vendor, ephemeral: tuple[int, int]
) -> tuple[EngineShare, ...]:
    """Return each engine's share; `environ` has the masks by which Slurm granted this step's GPUs.

    Raises ConfigError where the node has too few.
    """
    width = engine.gpus_per_engine if vendor != "none" else 0
    visible = granted(environ, vendor)
    devices = engine_devices(
        engine.count * width if visible is None else len(visible),
        engine.count,
        width,
        vendor,
        visible=visible,
        ephemeral=ephemeral,
    )
    return tuple(
        EngineShare(gpus=one.gpus, environment=one.environment, ports=one.ports) for one in devices
    )


def vendor_of(engine: EngineConfig) -> Vendor:
    """Return whose GPUs this node's engines use; `none` where they compute on the CPU."""
    if engine.kind == "embedded" or engine.sglang.device == "cpu":
        return "none"
    return next((vendor for vendor, path in DRIVERS.items() if path.exists()), "none")


def ephemeral_ports() -> tuple[int, int]:
    """Return the first and last port that this node's kernel gives to anybody who asks for any."""
    if not PORT_RANGE.is_file():
        return EPHEMERAL
    low, high = PORT_RANGE.read_text().split()
    return int(low), int(high)
