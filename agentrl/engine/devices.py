"""Which GPUs and ports each engine of this node may use, as the launcher divided them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.errors import ConfigError, LaunchError

MASKS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)
"""Variables that hide GPUs from a process; those that an engine's share does not set are unset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShare:
    """One engine's part of its node."""

    gpus: tuple[str, ...] = ()
    """As the node's own mask names them; empty: the engine's number says which."""
    environment: dict[str, str] = field(default_factory=dict)
    """The masks that leave just those GPUs."""
    ports: range = range(0)
    """Ports of its own; empty: any free one."""

    def environ(self, base: dict[str, str]) -> dict[str, str]:
        """Return `base` with this share's masks and no others; as it is where there are none."""
        if not self.environment:
            return dict(base)
        kept = {name: value for name, value in base.items() if name not in MASKS}
        return kept | self.environment


def check_shares(shares: Sequence[EngineShare], *, engines: int, gpus_per_engine: int) -> None:
    """Refuse shares that overlap or do not fit. Raises ConfigError."""
    if len(shares) != engines:
        raise ConfigError(
            f"engine.count={engines}: {len(shares)} shares of the node were given; there must be "
            "one for each engine"
        )
    owners = Counter(gpu for share in shares for gpu in share.gpus)
    if shared := sorted(gpu for gpu, count in owners.items() if count > 1):
        raise ConfigError(
            f"GPU {', '.join(shared)} is given to two engines: each of engine.count={engines} "
            "needs GPUs of its own; lower engine.count or ask for more GPUs"
        )
    ports = Counter(port for share in shares for port in share.ports)
    if twice := [port for port, count in ports.items() if count > 1]:
        raise ConfigError(f"port {min(twice)} is given to two engines: their ranges must not meet")
    for index, share in enumerate(shares):
        if share.gpus and len(share.gpus) != gpus_per_engine:
            raise ConfigError(
                f"engine {index}: {len(share.gpus)} GPUs ({', '.join(share.gpus)}) were given and "
                f"engine.gpus_per_engine={gpus_per_engine}; they must agree"
            )


def free_ports(count: int, band: range = range(0)) -> list[int]:
    """Return ports that were free just now, out of `band` if that is not empty.

    SGLang cannot bind 0 and say what it got; when another process takes one first, that start
    fails and the next asks again. Raises LaunchError when the band is all taken.
    """
    held: list[socket.socket] = []
    try:
        for port in band if len(band) else [0] * count:
            try:
                held.append(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue  # taken, as the band of a killed engine may be for a moment
            if len(held) == count:
                return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()
    raise LaunchError(
        f"ports {band.start} to {band.stop - 1}: {len(held)} of the {count} that an engine needs "
        "are free; see who listens there (ss -ltnp)"
    )
