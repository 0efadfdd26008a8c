"""Each engine of a job's node has GPUs and ports of its own, among those that Slurm granted."""

from __future__ import annotations

import pytest

from agentrl.config import EngineConfig
from agentrl.engine.devices import EngineShare, check_shares
from agentrl.errors import ConfigError
from launch.shares import ephemeral_ports, shares_of, vendor_of
from slurm.devices import EPHEMERAL, Vendor


def of(vendor: Vendor, mask: str | None = None, **config: int) -> tuple[EngineShare, ...]:
    names = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "ROCR_VISIBLE_DEVICES", "none": "CUDA_X"}
    environ = {} if mask is None else {names[vendor]: mask}
    engine = EngineConfig(kind="sglang", **config)  # type: ignore[arg-type]
    return shares_of(engine, environ, vendor=vendor, ephemeral=EPHEMERAL)


def test_the_granted_gpus_are_dealt_out_word_for_word() -> None:
    shares = of("nvidia", "GPU-a,GPU-b,GPU-c,GPU-d", count=2, gpus_per_engine=2)
    assert [one.gpus for one in shares] == [("GPU-a", "GPU-b"), ("GPU-c", "GPU-d")]
    assert shares[1].environment == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d"}
    check_shares(shares, engines=2, gpus_per_engine=2)


def test_on_amd_hip_counts_within_the_share() -> None:
    shares = of("amd", "4,5", count=2, gpus_per_engine=1)
    assert shares[1].environment["ROCR_VISIBLE_DEVICES"] == "5"
    assert shares[1].environment["HIP_VISIBLE_DEVICES"] == "0"


def test_engines_on_the_cpu_have_ports_and_no_masks() -> None:
    shares = of("none", count=3, gpus_per_engine=1)
    assert [one.environment for one in shares] == [{}] * 3
    assert len({port for one in shares for port in one.ports}) == 3 * len(shares[0].ports)
    check_shares(shares, engines=3, gpus_per_engine=1)


def test_no_port_is_one_that_the_kernel_gives_away() -> None:
    low, high = ephemeral_ports()
    engine = EngineConfig(count=8)
    for share in shares_of(engine, {}, vendor="none", ephemeral=(low, high)):
        assert not set(share.ports) & set(range(low, high + 1))


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="need 8 GPUs a node, and it has 4"):
        of("nvidia", "0,1,2,3", count=8, gpus_per_engine=1)


def test_an_engine_that_computes_on_the_cpu_has_no_vendor() -> None:
    assert vendor_of(EngineConfig(kind="embedded")) == "none"
