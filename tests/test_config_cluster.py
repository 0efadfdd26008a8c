"""The cluster section: presets by name, laid in whole, and every key documented."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from agentrl import config, config_cluster
from agentrl.config_cluster import ClusterConfig
from agentrl.errors import ConfigError
from launch.cluster_run import script_of
from launch.run_dir import RunDir
from slurm.render import check_bash

PRESETS = Path(config.__file__).parents[1] / "configs" / "clusters"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_presets_that_the_documentation_names_are_there() -> None:
    assert {"local", "lab", "mi355x", "lumi", "frontier", "alps"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_parses_and_says_where_its_facts_come_from(tmp_path: Path, name: str) -> None:
    found = config.load(write(tmp_path, "{}"), [f"cluster={name}"]).cluster
    assert found.name == name
    assert found.source


@pytest.mark.parametrize("layout", ["het", "homogeneous"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "local"])
def test_a_preset_makes_a_script_that_bash_takes(odd_path: Path, name: str, layout: str) -> None:
    overrides = [f"cluster={name}", f"cluster.layout={layout}", "cluster.inference.partition="]
    found = config.load(write(odd_path, "rollout: {nodes: 3}"), overrides)
    script = odd_path / "script.sbatch"
    script.write_text(script_of(found, RunDir(odd_path / "run"), 1, began="started"))
    check_bash(script)
    heads = "".join(line for line in script.read_text().splitlines() if "#SBATCH" in line)
    assert heads.count("hetjob") == (layout == "het")


def test_a_file_may_name_its_cluster(tmp_path: Path) -> None:
    found = config.load(write(tmp_path, "cluster: lab"))
    assert (found.cluster.name, found.cluster.trainer.partition) == ("lab", "trainer")


def test_a_preset_can_be_extended_like_any_file(tmp_path: Path) -> None:
    text = f"extends: {PRESETS / 'lab.yaml'}\ncluster: {{account: mine, trainer: {{mem_gb: 1}}}}"
    found = config.load(write(tmp_path, text)).cluster
    assert (found.name, found.account, found.trainer.mem_gb) == ("lab", "mine", 1)
    assert found.trainer.partition == "trainer"


def test_a_preset_of_ones_own_is_named_by_its_path(tmp_path: Path) -> None:
    write(tmp_path, "cluster: {name: ours, qos: high}", "ours.yaml")
    assert config.load(write(tmp_path, "cluster: ours.yaml")).cluster.qos == "high"


def test_the_command_line_names_a_cluster_and_then_its_keys(tmp_path: Path) -> None:
    overrides = ["cluster.inference.partition=other", "cluster=lab", "cluster.environment.A=1"]
    found = config.load(write(tmp_path, "seed: 3"), overrides)
    assert found.cluster.inference.partition == "other"
    assert (found.cluster.environment, found.seed) == ({"A": "1"}, 3)


def test_another_cluster_takes_nothing_of_the_one_before(tmp_path: Path) -> None:
    path = write(tmp_path, "cluster: lumi")
    assert config.load(path, ["cluster=local"]).cluster.modules == []
    again = write(tmp_path, "extends: run.yaml\ncluster: lab", "again.yaml")
    assert config.load(again).cluster.environment == {}


def test_an_unknown_preset_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster='frontie': no such preset; near it are fron"):
        config.load(write(tmp_path, "{}"), ["cluster=frontie"])
    with pytest.raises(ConfigError, match=r"run\.yaml: cluster='nowhere'.*alps, frontier"):
        config.load(write(tmp_path, "cluster: nowhere"))


def test_an_empty_value_clears_a_key(tmp_path: Path) -> None:
    path = write(tmp_path, "cluster: {account: mine}")
    assert config.load(path, ["cluster.account="]).cluster.account == ""


def test_a_saved_cluster_loads_to_the_same(odd_path: Path) -> None:
    found = config.load(write(odd_path, "{}"), ["cluster=lumi", "cluster.environment.X='a: b'"])
    config.save(found, odd_path / "config.yaml")
    assert config.load(odd_path / "config.yaml") == found


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cluster.layout=hetero", "did you mean 'het'"),
        ("cluster.requeue=always", r"cluster\.requeue='always': must be one of"),
        ("cluster.time_min=0", "must be 1 or more"),
        ("cluster.signal_s=3600", r"is not under cluster\.time_min=60"),
        ("cluster.trainer.cpus_per_task=0", "must be 1 or more"),
        ("cluster.environment.A-B=1", "no name of a variable"),
        ("cluster.environment.A=b: c", "must be a text; quote it"),
        ("cluster.traner.partition=x", r"near it are cluster\.trainer\.partition"),
    ],
)
def test_what_no_cluster_can_have_is_refused(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.load(write(tmp_path, "{}"), [override])


def test_gpus_are_asked_for_in_one_way(tmp_path: Path) -> None:
    text = "cluster: {trainer: {gres: 'gpu:8', gpus_per_node: 8}}"
    with pytest.raises(ConfigError, match="give one of them"):
        config.load(write(tmp_path, text))


GPUS = """
cluster: {name: mine, trainer: {gres: 'nvme,gpu:mi355x:4'}, inference: {gpus_per_node: 8}}
training: {device: gpu, ranks: 4}
engine: {kind: sglang, count: 4, gpus_per_engine: 2}
"""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], ""),
        (
            ["training.ranks=8"],
            "training.ranks=8: a node of the trainer has to have 8 GPUs and .* 4;",
        ),
        (["training.ranks=8", "training.share_gpus=true"], ""),
        (["training.ranks=8", "training.device=cpu"], ""),
        (["training.ranks=8", "cluster.trainer.gres=''"], ""),  # asked for in a way of the site's
        (["training.ranks=8", "cluster.layout=homogeneous"], ""),  # any node has what either asks
        (["training.ranks=8", "cluster.name=local"], ""),
        (["engine.count=5"], "engine.count=5 of engine.gpus_per_engine=2: a node of the inference"),
    ],
)
def test_nodes_with_fewer_gpus_than_are_used_are_not_queued_for(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    path = write(tmp_path, GPUS)
    if said:
        with pytest.raises(ConfigError, match=said):
            config.load(path, overrides)
    else:
        config.load(path, overrides)


def test_without_a_cluster_a_run_is_local() -> None:
    assert not ClusterConfig().is_slurm
    assert ClusterConfig(name="lab").is_slurm


def test_every_key_of_a_cluster_has_its_doc_line() -> None:
    missing = []
    for node in ast.parse(inspect.getsource(config_cluster)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for item, following in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(item, ast.AnnAssign) or "RoleResources" in ast.unparse(item):
                continue
            if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
                missing.append(f"{node.name}.{ast.unparse(item.target)}")
    assert missing == []
