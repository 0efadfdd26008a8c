"""Masks and port bands: disjoint, complete, the same each time, inside their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from slurm.devices import Vendor, engine_devices, foreign_masks, granted

VENDORS: tuple[Vendor, ...] = ("nvidia", "amd")
SHAPES = st.tuples(st.integers(1, 8), st.integers(1, 8), st.sampled_from(VENDORS))
RANGES = st.tuples(st.integers(1024, 60000), st.integers(0, 5000)).map(
    lambda pair: (pair[0], min(pair[0] + pair[1], 65535))
)


@given(SHAPES, st.integers(0, 3))
def test_no_gpu_is_given_twice_and_all_engines_have_their_share(
    shape: tuple[int, int, Vendor], spare: int
) -> None:
    engines, each, vendor = shape
    made = engine_devices(engines * each + spare, engines, each, vendor)
    given_out = [gpu for one in made for gpu in one.gpus]
    assert given_out == [str(at) for at in range(engines * each)]
    assert {len(one.gpus) for one in made} == {each}
    assert made == engine_devices(engines * each + spare, engines, each, vendor)


@given(SHAPES, RANGES, st.integers(1, 200))
def test_port_bands_neither_meet_nor_leave_their_bounds(
    shape: tuple[int, int, Vendor], ephemeral: tuple[int, int], each: int
) -> None:
    engines, gpus, vendor = shape
    made = engine_devices(
        engines * gpus, engines, gpus, vendor, ephemeral=ephemeral, ports_per_engine=each
    )
    ports = [port for one in made for port in one.ports]
    assert len(ports) == len(set(ports)) == engines * each
    assert min(ports) >= 1024
    assert max(ports) <= 65535
    assert not set(ports) & set(range(ephemeral[0], ephemeral[1] + 1))


@given(st.integers(1, 7))
def test_an_engines_band_does_not_move_when_others_are_added(engines: int) -> None:
    assert engine_devices(8, engines, 1, "amd") == engine_devices(8, engines + 1, 1, "amd")[:-1]


@given(st.lists(st.sampled_from("01234567"), min_size=1, unique=True), st.sampled_from(VENDORS))
def test_slurms_own_names_of_devices_are_divided_word_for_word(
    visible: list[str], vendor: Vendor
) -> None:
    made = engine_devices(len(visible), len(visible), 1, vendor, visible=visible)
    assert [one.gpus for one in made] == [(name,) for name in visible]


@given(SHAPES)
def test_an_engine_that_reads_its_own_mask_finds_its_own_gpus(
    shape: tuple[int, int, Vendor],
) -> None:
    engines, each, vendor = shape
    for one in engine_devices(engines * each, engines, each, vendor):
        assert granted(one.environment, vendor) == one.gpus


def test_on_amd_hip_counts_within_what_rocr_left() -> None:
    second = engine_devices(4, 2, 2, "amd", visible=["4", "5", "6", "7"])[1]
    assert second.environment == {
        "ROCR_VISIBLE_DEVICES": "6,7",
        "HIP_VISIBLE_DEVICES": "0,1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }


def test_on_nvidia_uuids_are_kept_and_amds_masks_are_foreign() -> None:
    made = engine_devices(2, 2, 1, "nvidia", visible=["GPU-ab", "GPU-cd"])
    assert made[1].environment == {"CUDA_VISIBLE_DEVICES": "GPU-cd"}
    assert "ROCR_VISIBLE_DEVICES" in foreign_masks("nvidia")


@pytest.mark.parametrize(
    ("environment", "vendor", "expected"),
    [
        ({}, "nvidia", None),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "nvidia", ("2", "3")),
        ({"CUDA_VISIBLE_DEVICES": ""}, "nvidia", ()),
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, "amd", ("4", "5")),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, "amd", ("5",)),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5"}, "amd", ("4", "5")),
        ({"HIP_VISIBLE_DEVICES": "3"}, "amd", ("3",)),
        ({"CUDA_VISIBLE_DEVICES": "2"}, "none", None),
    ],
)
def test_what_slurm_gave_is_read_from_the_masks(
    environment: dict[str, str], vendor: Vendor, expected: tuple[str, ...] | None
) -> None:
    assert granted(environment, vendor) == expected


def test_masks_that_contradict_each_other_are_refused() -> None:
    masks = {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "6"}
    with pytest.raises(ConfigError, match="points past its end"):
        granted(masks, "amd")


@pytest.mark.parametrize(
    ("gpus", "engines", "each", "vendor", "said"),
    [
        (8, 0, 1, "amd", "engines must be 1"),
        (8, 9, 1, "amd", "need 9 GPUs a node, and it has 8"),
        (8, 8, 0, "nvidia", "vendor none"),
        (8, 8, 1, "none", "vendor none"),
    ],
)
def test_more_than_there_is_is_refused(
    gpus: int, engines: int, each: int, vendor: Vendor, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_devices(gpus, engines, each, vendor)


def test_a_mask_of_another_length_than_the_config_says_is_refused() -> None:
    with pytest.raises(ConfigError, match="must name 8 different devices"):
        engine_devices(8, 8, 1, "nvidia", visible=["0", "1"])


def test_ports_without_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="no room"):
        engine_devices(1, 1, 1, "amd", ephemeral=(1024, 65535))
    with pytest.raises(ConfigError, match="meet the ephemeral range"):
        engine_devices(1, 1, 1, "amd", first_port=32760)


def test_engines_without_gpus_have_ports_and_no_mask() -> None:
    made = engine_devices(0, 2, 0, "none")
    assert [one.environment for one in made] == [{}, {}]
    assert made[0].ports.stop == made[1].ports.start == 20064
