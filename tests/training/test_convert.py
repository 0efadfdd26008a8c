from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from agentrl.errors import ConfigError, PublishError
from agentrl.hf_shape import FAMILIES, Layout, read_shape
from agentrl.training import convert, hf_tables
from agentrl.training.weight_files import INDEX

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 300,
}


def make_config(family: str, **more) -> dict:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    is_moe = family == "qwen3_moe"
    return {"model_type": family, **SIZES, **(experts if is_moe else {}), **more}


def make_tensors(config, dtype=torch.bfloat16) -> dict:
    shape = read_shape(config)
    return {
        name: torch.randn(size).to(dtype)
        for place in hf_tables.places(shape, Layout())
        for name, size in zip(place.hf, hf_tables.shapes_of(place, shape), strict=True)
    }


def write(folder, config, tensors):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(folder) -> dict:
    return {
        name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()
    }


layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    spec=st.sampled_from(["local", "te"]),
)


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    family=st.sampled_from(FAMILIES),
    layout=layouts,
    is_tied=st.booleans(),
    is_fused=st.booleans(),
)
def test_there_and_back_again_is_bit_for_bit(tmp_path_factory, family, layout, is_tied, is_fused):
    assume(family == "qwen3_moe" or layout.ep == 1)
    folder = tmp_path_factory.mktemp("a model's folder")
    config = make_config(family, tie_word_embeddings=is_tied)
    tensors = make_tensors(config)
    given = tensors
    if is_fused:
        given = dict(convert.fused_experts(tensors.items(), read_shape(config)))
    source = write(folder / "hf", config, given)
    convert.to_megatron(source, folder / "megatron", layout)
    convert.to_hf(folder / "megatron", folder / "back")
    back = read(folder / "back")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_experts_come_back_fused_where_that_is_asked(tmp_path):
    config = make_config("qwen3_moe")
    tensors = make_tensors(config)
    convert.to_megatron(write(tmp_path / "hf", config, tensors), tmp_path / "m", Layout(ep=2))
    convert.to_hf(tmp_path / "m", tmp_path / "back", fuses_experts=True)
    back = read(tmp_path / "back")
    name = "model.layers.1.mlp.experts."
    expert = torch.cat([tensors[f"{name}2.gate_proj.weight"], tensors[f"{name}2.up_proj.weight"]])
    assert torch.equal(back[f"{name}gate_up_proj"][2], expert)
    single = dict(convert.single_experts(back.items()))
    assert all(torch.equal(single[name], tensors[name]) for name in tensors)


def test_queries_keys_and_values_lie_by_group_and_vocabulary_is_padded(tmp_path):
    config = make_config("qwen3")
    tensors = make_tensors(config)
    convert.to_megatron(write(tmp_path / "hf", config, tensors), tmp_path / "m", Layout(tp=2))
    second = read(tmp_path / "m" / "dense-pp00-tp01")
    qkv = second["decoder.layers.0.self_attention.linear_qkv.weight"]
    attention = "model.layers.0.self_attn."
    assert torch.equal(qkv[:8], tensors[f"{attention}q_proj.weight"][16:24])
    assert torch.equal(qkv[8:12], tensors[f"{attention}k_proj.weight"][8:12])
    assert torch.equal(qkv[12:16], tensors[f"{attention}v_proj.weight"][8:12])
    assert second["embedding.word_embeddings.weight"].shape == (256, 16)
    assert not second["embedding.word_embeddings.weight"][300 - 256 :].any()


def test_files_are_of_a_bucket_and_an_index_names_them(tmp_path):
    config = make_config("llama", vocab_size=40_000, hidden_size=32)
    tensors = make_tensors(config)
    convert.to_megatron(write(tmp_path / "hf", config, tensors), tmp_path / "m", Layout())
    convert.to_hf(tmp_path / "m", tmp_path / "back", bucket_mb=1)
    index = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert all(torch.equal(read(tmp_path / "back")[name], tensors[name]) for name in index)


def test_config_and_weights_that_disagree_are_told_with_tensor_and_shapes(tmp_path):
    config = make_config("qwen3")
    source = write(tmp_path / "hf", config | {"intermediate_size": 32}, make_tensors(config))
    words = r"gate_proj\.weight is \[24, 16\] in the weights and \[32, 16\] by config\.json"
    with pytest.raises(ConfigError, match=words):
        convert.to_megatron(source, tmp_path / "m", Layout())
    assert not (tmp_path / "m").exists()


def test_a_tensor_that_is_missing_or_left_over_is_named(tmp_path):
    config = make_config("llama")
    tensors = make_tensors(config)
    left = write(tmp_path / "left", config, tensors | {"model.extra.weight": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"model\.extra\.weight has no place in llama"):
        convert.to_megatron(left, tmp_path / "m", Layout())
    del tensors["model.norm.weight"]
    missing = write(tmp_path / "missing", config, tensors)
    with pytest.raises(ConfigError, match=r"no tensor model\.norm\.weight"):
        convert.to_megatron(missing, tmp_path / "m", Layout())


@pytest.mark.usefixtures("small_files_only")
def test_a_disk_that_is_full_is_told_and_leaves_nothing(tmp_path):
    config = make_config("llama", vocab_size=3500)
    tensors = make_tensors(config)
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    source = write(tmp_path / "hf", config, tensors)
    os.rename(source / "model.safetensors", source / "1.safetensors")
    save_file(head, source / "2.safetensors")  # each file is under the limit, both together over
    with pytest.raises(PublishError, match=r"writing .*m: .*nothing is left of it"):
        convert.to_megatron(source, tmp_path / "m", Layout())
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("text", ["", "[]", '{"tp": "2"}', '{"tp": 1e300}', '{"width": 2}'])
def test_a_megatron_folder_whose_layout_lies_is_refused(tmp_path, text):
    config = make_config("llama")
    convert.to_megatron(
        write(tmp_path / "hf", config, make_tensors(config)), tmp_path / "m", Layout()
    )
    (tmp_path / "m" / convert.LAYOUT).write_text(text)
    with pytest.raises(ConfigError, match=r"layout|sizes must be 1 or more"):
        convert.to_hf(tmp_path / "m", tmp_path / "back")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=3), "tp=3 does not divide the model's 8 attention heads"),
        (Layout(tp=8), "4 key-value heads"),
        (Layout(ep=3), "ep=3 does not divide the model's 4 experts"),
        (Layout(pp=3), "pp=3 does not divide the model's 4 layers"),
        (Layout(tp=0), "must be 1 or more"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout, words):
    with pytest.raises(ConfigError, match=words):
        layout.check(read_shape(make_config("qwen3_moe")))


@pytest.mark.parametrize(
    "odd", [{"model_type": "gpt2"}, {"attention_bias": True}, {"mlp_only_layers": [1]}]
)
def test_models_that_the_map_does_not_hold_are_refused(odd):
    with pytest.raises(ConfigError):
        read_shape(make_config("qwen3") | odd)
