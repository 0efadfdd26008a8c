"""The command line: usage, refusals, help that is quick."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from agentrl import config as schema
from agentrl.config import RunConfig
from agentrl.errors import ConfigError, Interrupted, LaunchError, WaitTimeout
from agentrl.events import NoEvents
from launch import cli, demo, evaluate, resume, status, train
from launch.command import guard
from launch.progress import Bar, EventTail, Standing
from launch.run_dir import RunDir, create, settled
from launch.signals import StopFlag

EIGHT_HEADS = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 96,
}
MEGATRON = [
    "training.backend=megatron",
    "training.device=gpu",
    "training.ranks=3",
    "training.tensor_parallel=3",
]
TE = ["training.backend=megatron", "training.device=gpu", "training.megatron_layers=te"]


def small(folder: Path, **keys: object) -> RunConfig:
    return settled(RunConfig(name="r", runs_dir=str(folder), **keys))  # type: ignore[arg-type]


def agentrl(*argv: str) -> int | str | None:
    """Run a command in this process; return its exit code."""
    try:
        return cli.main(argv)
    except SystemExit as ended:  # argparse's way
        return ended.code


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from launch import cli; code = cli.main(['--help']);"
        "print({'torch', 'numpy', 'omegaconf', 'rich'} & set(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in cli.COMMANDS)
    assert done.stdout.endswith("set()\n")


@pytest.mark.slow
def test_an_inference_node_starts_its_engines_without_importing_torch_itself() -> None:
    """Four CPU seconds of each node, before its first engine."""
    imported = "launch.roles, agentrl.rollout.node, agentrl.rollout.worker"
    assert loaded(imported, "torch", "transformers") == "set()\n"


@pytest.mark.slow
def test_an_inference_node_starts_its_engines_before_it_imports_what_a_worker_needs() -> None:
    own = "launch.roles, agentrl.rollout.node"
    assert loaded(own, "agentrl.rollout.worker", "numpy", "pyarrow", "jinja2") == "set()\n"


def loaded(imported: str, *names: str) -> str:
    """Return which of these modules a process has that imports those."""
    code = f"import sys, {imported}; print(set({names}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_a_module_that_runs_by_itself(name: str) -> None:
    module = importlib.import_module(f"launch.{name}")
    assert callable(module.main)
    assert Path(str(module.__file__)).read_text().endswith("\n    sys.exit(guard(main))\n")


@pytest.mark.parametrize(("rows", "said"), [(None, "no such file"), ("", "`train` is empty")])
def test_a_run_without_tasks_is_refused_before_any_role_starts(
    tmp_path: Path, rows: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    if rows is not None:
        (tmp_path / "train.jsonl").write_text(rows)
    path = tmp_path / "c.yaml"
    path.write_text(
        f"name: r\nruns_dir: {tmp_path}/runs\nmodel: {{path: {tmp_path}}}\n"
        f"tasks: {{folder: {tmp_path}}}\n"
    )
    assert agentrl("train", str(path)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_unknown_command_names_its_neighbours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "did you mean train" in capsys.readouterr().err
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", "no.yaml"], "config no.yaml: no such file"),
        (["train"], "required: CONFIG"),
        (["resume", "no-run"], "no config.yaml in it"),
        (["status"], "no run in"),
    ],
)
def test_wrong_usage_exits_2_with_one_message_and_no_traceback(
    tmp_path: Path,
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert agentrl(*argv) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), 2),
        (Interrupted("a"), 75),
        (LaunchError("a"), 1),
        (WaitTimeout("a"), 1),
        (ZeroDivisionError("a"), 1),
    ],
)
def test_errors_become_exit_codes(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: object) -> int:
        raise error

    assert guard(fail, []) == code
    assert ("Traceback" in capsys.readouterr().err) == isinstance(error, ZeroDivisionError)


def test_options_and_overrides_come_in_any_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: r\n")
    assert agentrl("train", str(path), "--", "training.steps=0x") == 2
    assert "training.steps" in capsys.readouterr().err


def test_a_run_of_the_same_name_with_another_config_is_refused(odd_path: Path) -> None:
    run = create(small(odd_path), ["agentrl", "train"])
    assert create(small(odd_path), []) == run
    with pytest.raises(ConfigError, match=r"seed: 0 → 1.*agentrl resume"):
        create(small(odd_path, seed=1), [])
    provenance = json.loads((run.path / "provenance.json").read_bytes())
    assert provenance["argv"] == ["agentrl", "train"]
    assert provenance["versions"]["torch"]


def test_what_a_caller_does_to_a_runs_config_is_seen_by_no_other(tmp_path: Path) -> None:
    run = create(RunConfig(name="r", runs_dir=str(tmp_path)), ["train"])
    run.config().training.steps = 7
    assert run.config().training.steps == RunConfig().training.steps


def test_training_starts_from_the_model_that_was_tuned_from_its_own(tmp_path: Path) -> None:
    config = settled(small(tmp_path))
    tuned = tmp_path / "r" / "sft" / "model"
    assert train.starting_config(config).model.path.endswith("data/demo/model")
    tuned.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (tuned / name).write_text("{}")
    schema.save(config, tuned.parent / "config.yaml")
    assert train.starting_config(config).model.path == str(tuned)
    other = replace(config, model=replace(config.model, path="/x"))
    assert train.starting_config(other).model.path == "/x"


def test_a_missing_model_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"runs_dir: {tmp_path / 'runs'}\nmodel: {{path: {tmp_path / 'none'}}}\n")
    assert agentrl("train", str(path)) == 2
    assert "agentrl prepare" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (MEGATRON, "tp=3 does not divide the model's 8 attention heads"),
        (TE, "training.megatron_layers=te: Transformer Engine is not installed"),
        (["training.router_balance_coef=0.001"], "is a qwen3 without experts; set 0"),
    ],
)
def test_a_model_that_the_trainer_cannot_take_is_told_before_a_job_is_queued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: list[str], said: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(EIGHT_HEADS))
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(f"name: r\nruns_dir: {tmp_path}\nmodel: {{path: {model}}}\n")
    assert agentrl("train", str(tmp_path / "run.yaml"), *keys) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_resume_changes_only_steps_and_timeouts(tmp_path: Path) -> None:
    config = small(tmp_path)
    changed = resume.changed(config, ["training.steps=7", "engine.start_timeout_s=9", "grace_s=5"])
    assert (changed.training.steps, changed.engine.start_timeout_s, changed.grace_s) == (
        7,
        9.0,
        5.0,
    )
    with pytest.raises(ConfigError, match=r"training\.lr: a resumed run keeps it"):
        resume.changed(config, ["training.lr=1"])
    with pytest.raises(ConfigError, match="do not nest"):
        resume.changed(config, ["agent.turn_timeout_s=1"])


def test_the_stop_file_is_seen_and_told_once(tmp_path: Path) -> None:
    stop = StopFlag(tmp_path / "STOP", NoEvents())
    assert not stop()
    (tmp_path / "STOP").write_bytes(b"")
    stop._next_look = 0.0
    assert (stop(), stop(), stop.cause, stop.count) == (True, True, "STOP", 1)


def test_a_tail_reads_each_whole_line_once(tmp_path: Path) -> None:
    tail, standing = EventTail(tmp_path), Standing()
    path = tmp_path / "inference-0-1.jsonl"
    line = (
        b'{"kind":"trajectory","trajectory":"0/0/0","draw":0,"task":"t","attempt":0,'
        b'"cause":"submitted","end":100.0}\n'
    )
    path.write_bytes(line + b"not json\n" + line[:30])
    standing.add(tail.read())
    assert standing.trajectories == 1
    with path.open("ab") as file:
        file.write(line[30:] + b'{"kind":"drop","what":"group","reason":"stale","count":2}\n')
    standing.add(tail.read())
    assert (standing.trajectories, standing.drops) == (2, {"group: stale": 2})
    assert standing.trajectories_per_hour(at=136.0) == pytest.approx(200)


def test_a_tail_goes_on_where_a_file_went_after_it_was_listed(tmp_path: Path) -> None:
    (tmp_path / "trainer-a-1.jsonl").symlink_to(tmp_path / "gone")
    assert EventTail(tmp_path).read() == []


def test_the_newest_step_counts_whatever_the_pids_of_the_trainers_were(tmp_path: Path) -> None:
    for pid, step in ((2, 3), (1, 8)):
        line = {"kind": "step", "step": step, "version": step, "end": 100.0 + step}
        line |= dict.fromkeys(["wait_s", "logprob_s", "update_s", "publish_s"], 1)
        (tmp_path / f"trainer-0-{pid}.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    standing = Standing()
    standing.add(EventTail(tmp_path).read())
    assert standing.step == 8


def test_progress_into_a_pipe_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("fine-tuning", 2) as bar:
        for done in (1, 1, 2):
            bar.update(done, "loss 1.0")
    assert capsys.readouterr().out == "fine-tuning 1/2 loss 1.0\nfine-tuning 2/2 loss 1.0\n"


def test_status_of_a_fresh_run_is_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create(small(tmp_path), [])
    assert status.main([str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["attempts"], found["steps"]) == ("not begun", 0, 100)
    assert status.main([str(run.path)]) == 0
    assert "not begun" in capsys.readouterr().out


def test_the_demo_says_each_command_and_skips_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path)
    planned = demo.stages(config, ["c.yaml", "name=r"], control_attempts=2)
    assert [stage.command for stage in planned] == [
        "prepare",
        "sft",
        "evaluate",
        "train",
        "evaluate",
        "report",
    ]
    assert len(planned[2].products) == 4
    for product in planned[2].products:
        product.parent.mkdir(parents=True)
        product.write_text("{}")
    assert demo.play(planned[2], config.run_dir) == 0
    said = capsys.readouterr().out
    assert said.startswith("$ agentrl evaluate c.yaml name=r --label sft --model")
    assert "done before" in said
    assert "--each held_out:1.0 --each held_out:0.5:2 " in said


def test_the_demo_refuses_a_cluster() -> None:
    with pytest.raises(ConfigError, match="the demo runs on this machine alone"):
        demo.main(["configs/demo.yaml", "cluster=lab"])


def test_an_evaluation_takes_its_attempts_from_the_choice_or_the_config(tmp_path: Path) -> None:
    config = small(tmp_path)
    made = evaluate.chosen(config, ["held_out:0.5:2", "train:1"])
    wanted = [(one.evaluation.split, one.evaluation.temperature) for one in made]
    assert wanted == [("held_out", 0.5), ("train", 1.0)]
    assert [one.evaluation.attempts for one in made] == [2, config.evaluation.attempts]
    assert evaluate.chosen(config, None) == [config]
    with pytest.raises(ConfigError, match="must be SPLIT:T or SPLIT:T:N"):
        evaluate.chosen(config, ["held_out:0.5:two"])


def test_a_run_that_is_not_there_names_those_beside_it(tmp_path: Path) -> None:
    create(small(tmp_path), [])
    with pytest.raises(ConfigError, match="runs beside it: r"):
        RunDir.open(tmp_path / "q")
    assert schema.load(tmp_path / "r" / "config.yaml").runs_dir == str(tmp_path)
