"""Model folders that lie: each is refused with words before a model is made of it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.errors import ConfigError
from agentrl.hf_shape import Layout
from agentrl.training import convert
from agentrl.training.model_folder import load_model
from agentrl.training.weight_files import INDEX

NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.fixture
def folder(tiny_model, odd_path):
    return shutil.copytree(tiny_model, odd_path / "model")


def tell(folder, **changes):
    told = json.loads((folder / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps(told))


def change(folder, **tensors):
    held = load_file(folder / "model.safetensors") | tensors
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def cut_in_two(folder, index=None):
    """Put a folder's tensors into two files and an index."""
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    table = {}
    for number in range(2):
        part = {name: held[name] for name in sorted(held)[number::2]}
        save_file(part, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        table |= dict.fromkeys(part, f"part-{number}.safetensors")
    told = {"metadata": {}, "weight_map": table | (index or {})}
    (folder / INDEX).write_text(json.dumps(told))


def assert_refused(folder, words):
    with pytest.raises(ConfigError, match=words):
        load_model(folder)
    with pytest.raises(ConfigError, match=words):
        convert.to_megatron(folder, folder.with_name("out"), Layout())
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"]


@pytest.mark.parametrize("size", [0, -3, 2.5, "32", True, 1e300, [2]])
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_key_value_heads"])
def test_a_size_that_is_no_whole_number_is_refused(folder, key, size):
    tell(folder, **{key: size})
    assert_refused(folder, rf"{key} is .* in config\.json: must be a whole number of 1 or more")


def test_a_size_that_is_missing_is_named(folder):
    tell(folder, vocab_size=None)
    assert_refused(folder, r"vocab_size is missing in config\.json")


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_huge_size_is_held_against_the_weights_before_anything_is_made(folder, key):
    tell(folder, **{key: 10**12})
    assert_refused(folder, r"model\.layers\.2\.|1000000000000")


def test_fewer_layers_than_the_weights_have_are_no_model(folder):
    tell(folder, num_hidden_layers=1)
    assert_refused(folder, r"model\.layers\.1\..* has no place in qwen3 of 1 layers")


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "null"])
def test_a_config_that_is_none_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert_refused(folder, r"config\.json: (not readable|holds a)")


def test_weights_in_two_files_are_read_as_their_index_says(folder):
    whole = dict(load_model(folder).named_parameters())
    cut_in_two(folder)
    parts = dict(load_model(folder).named_parameters())
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    save_file({"exp_avg/x": torch.ones(1)}, folder / "optimizer.safetensors")  # as checkpoints have
    assert convert.to_megatron(folder, folder.with_name("out"), Layout())


@pytest.mark.parametrize("name", ["../part-0.safetensors", "/etc/passwd", ".", "", 3, ["x"]])
def test_an_index_that_names_files_elsewhere_is_refused(folder, name):
    cut_in_two(folder, {NORM: name})
    shutil.copy(folder / "part-0.safetensors", folder.parent)
    with pytest.raises(ConfigError, match="index"):
        load_model(folder)


@pytest.mark.parametrize("name", ["gone.safetensors", "config.json"])
def test_an_index_that_names_what_holds_no_weights_is_refused(folder, name):
    cut_in_two(folder, {NORM: name})
    assert_refused(folder, rf"names {name}, which is no safetensors file there")


def test_pickled_weights_are_not_read(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_refused(folder, r"no \*\.safetensors there")


def test_a_tensor_in_two_files_is_named_with_both(folder):
    cut_in_two(folder)
    for number in range(2):
        part = load_file(folder / f"part-{number}.safetensors") | {NORM: torch.ones(32)}
        save_file(part, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    assert_refused(folder, rf"{NORM} is in part-0\.safetensors and in part-1\.safetensors")


@pytest.mark.parametrize("size", [0, 7, 1000])
def test_a_torn_file_is_named(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert_refused(folder, r"model\.safetensors: not a safetensors file")


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(folder, odd):
    change(folder, **{NORM: torch.tensor([odd, *[1.0] * 31])})
    with pytest.raises(ConfigError, match=rf"{NORM} .* holds NaN or infinity"):
        load_model(folder)


def test_the_copy_of_a_tied_head_is_passed_over(folder):
    change(folder, **{HEAD: load_file(folder / "model.safetensors")["model.embed_tokens.weight"]})
    assert HEAD not in dict(load_model(folder).named_parameters())
    assert convert.to_megatron(folder, folder.with_name("out"), Layout())


def test_a_head_of_its_own_that_the_config_says_is_tied_is_refused(folder):
    change(folder, **{HEAD: torch.ones(64, 32)})
    assert_refused(folder, rf"tie_word_embeddings=true, and {HEAD} is not equal")


def test_code_in_a_model_folder_is_never_run(folder):
    tell(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    (folder / "mine.py").write_text(f"open({str(folder / 'was run')!r}, 'w')")
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        load_model(folder)
    assert not (folder / "was run").exists()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    from megatron_ranks import make_family

    return make_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.mark.parametrize("experts", [2, 8])
def test_another_number_of_experts_than_the_weights_have_is_refused(mixture, tmp_path, experts):
    folder = shutil.copytree(mixture, tmp_path / "model")
    tell(folder, num_experts=experts, num_local_experts=experts)
    assert_refused(folder, r"\.experts\.|mlp\.gate\.weight is \[4, 32\]")
