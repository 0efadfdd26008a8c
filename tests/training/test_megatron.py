"""Both back ends held equal; needs megatron-core beside torch, and no GPU."""

from __future__ import annotations

import importlib.util

import pytest
from fabricate import run_ranks
from megatron_ranks import make_family

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed: pip install 'megatron-core>=0.16.1,<0.20'",
    ),
]


@pytest.mark.parametrize(
    ("family", "tp", "ep", "packing"),
    [
        ("qwen3", 1, 1, "packed"),
        ("llama", 2, 1, "padded"),
        ("qwen3_moe", 1, 2, "packed"),
        ("qwen3_moe", 2, 2, "packed"),
    ],
)
def test_megatron_and_torch_agree_to_1e_5(tmp_path, family, tp, ep, packing):
    folder = make_family(tmp_path / "model", family)
    run_ranks(tmp_path, "megatron_ranks:agree", max(tp, ep), str(folder), str(tp), str(ep), packing)


def test_a_run_by_the_loop_resumes_as_if_it_had_never_stopped(tmp_path):
    folder = make_family(tmp_path / "model", "qwen3")
    run_ranks(tmp_path, "megatron_ranks:run", 2, str(folder))
