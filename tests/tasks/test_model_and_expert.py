"""The tokenizer and model that `prepare` makes, and the expert's tries in the agent's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agentrl.agent.loop import AgentResult, run_agent
from agentrl.agent.prompts import Prompts
from agentrl.agent.tokens import ChatTokens
from agentrl.config import AgentConfig, ModelConfig, RunConfig, SandboxConfig, TasksConfig
from agentrl.errors import ConfigError, TaskError
from agentrl.events import NoEvents
from agentrl.sandbox.provider import open_provider
from agentrl.tasks.build import build
from agentrl.tasks.command import try_command
from agentrl.tasks.expert import FENCE, ExpertEngine
from agentrl.tasks.grade import grade
from agentrl.tasks.library import all_names
from agentrl.tasks.load import image_folder, load_split
from agentrl.tasks.model_init import END, make_model, make_tokenizer, save_model
from agentrl.tasks.prepare import prepare
from agentrl.tasks.rows import to_task
from agentrl.tasks.splits import partition
from agentrl.tasks.task import Task

PROMPTS = Path(__file__).parents[2] / "configs/agents/repair.yaml"
SMALL = ModelConfig(hidden_size=32, intermediate_size=32, layers=1, heads=2, head_dim=16)


@pytest.fixture(scope="module")
def tasks() -> Iterator[list[Task]]:
    rows = build(partition(0), "train", 1, 0)
    yield [to_task(row) for row in islice(rows, 40)]
    rows.close()


@pytest.fixture(scope="module")
def folder(tasks: list[Task], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("init") / "model"
    tokenizer = make_tokenizer((task.problem_statement for task in tasks), 640)
    save_model(made, make_model(SMALL, tokenizer, 0), tokenizer, {})
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)  # type: ignore[no-any-return]


def test_any_text_survives_encoding(tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> None:
    texts = [task.problem_statement for task in tasks] + [
        *tasks[0].files.values(),
        "é\t⟦x⟧ \\n | 1s|",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_name_is_two_tokens_wherever_it_stands(tokenizer: PreTrainedTokenizerFast) -> None:
    for name in all_names():
        ids = tokenizer.encode(name, add_special_tokens=False)
        for text in (f"1 def {name}(", f"return {name} < {name}", f"\nassert {name}({name})"):
            found = tokenizer.encode(text)
            assert [found[i : i + len(ids)] for i in range(len(found))].count(ids) >= 1


def test_prompts_and_tries_are_short(tokenizer: PreTrainedTokenizerFast, tasks: list[Task]) -> None:
    prompts = [len(tokenizer.encode(task.problem_statement)) for task in tasks]
    assert sum(prompts) / len(prompts) < 70
    for task in tasks:
        assert task.fix is not None
        assert len(tokenizer.encode(FENCE.format(command=try_command(*task.fix)))) <= 8


def test_the_folder_loads_by_the_auto_classes(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert tokenizer.eos_token == END
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize("mode", ["text", "tool"])
def test_the_chat_template_only_appends(folder: Path, mode: str) -> None:
    tokens = ChatTokens.load(folder, mode=mode)
    assert tokens.decode([tokens.end_of_turn]) == END
    assert tokens.end_of_turn in tokens.stop_ids


def run_expert(
    task: Task, folder: Path, tmp_path: Path, *, accuracy: float, mode: str = "text"
) -> tuple[AgentResult, bool]:
    async def run() -> tuple[AgentResult, bool]:
        provider = open_provider(
            SandboxConfig(), run="test", leases=tmp_path / "leases", concurrency=2
        )
        tokens = ChatTokens.load(folder, mode=mode)
        image = image_folder(TasksConfig(folder=str(tmp_path)), task)
        try:
            sandbox = await provider.start(image, owner="test")
            result = await run_agent(
                task=task,
                sandbox=sandbox,
                engine=ExpertEngine(tokens, task, seed=0, accuracy=accuracy, mode=mode),
                tokens=tokens,
                prompts=Prompts.load(PROMPTS),
                config=AgentConfig(mode=mode),
                trajectory="0/0/0",
                events=NoEvents(),
            )
            verdict = await grade(task, sandbox, image=image, timeout_s=60)
            return result, verdict.resolved
        finally:
            await provider.close()

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["text", "tool"])
def test_a_sure_expert_hands_in_at_its_first_try(
    mode: str, tasks: list[Task], folder: Path, tmp_path: Path
) -> None:
    result, resolved = run_expert(tasks[0], folder, tmp_path, accuracy=1.0, mode=mode)
    assert (result.cause, result.turns, resolved) == ("submitted", 1, True)


def test_an_expert_that_never_knows_shows_the_failing_line_each_time(
    tasks: list[Task], folder: Path, tmp_path: Path
) -> None:
    task = next(task for task in tasks if len(task.rivals) > 6)
    result, resolved = run_expert(task, folder, tmp_path, accuracy=0.0)
    said = [message["content"] for message in result.messages if message["role"] == "assistant"]
    assert len(set(said)) == len(said)
    if not resolved:
        assert (result.cause, result.turns) == ("turn_limit", 3)
        seen = [message["content"] for message in result.messages if message["role"] == "user"]
        assert all("\n" not in text for text in seen[1:])


def test_an_expert_needs_a_known_fix(tasks: list[Task], folder: Path) -> None:
    tokens = ChatTokens.load(folder, mode="text")
    with pytest.raises(TaskError, match="no one-line fix"):
        ExpertEngine(tokens, Task(**{**_fields(tasks[0]), "fix": None}), seed=0, accuracy=0.1)


def _fields(task: Task) -> dict[str, object]:
    return {name: getattr(task, name) for name in Task.__slots__}


def small_config(folder: Path) -> RunConfig:
    config = RunConfig()
    config.tasks = TasksConfig(
        folder=str(folder / "tasks"), train=6, held_out=4, unseen_sites=3, unseen_functions=3
    )
    config.model = SMALL
    config.model.path, config.model.init = str(folder / "model"), "qwen3"
    config.sft.traces = 8
    return config


@pytest.mark.slow
def test_prepare_makes_everything_once(odd_path: Path) -> None:
    config = small_config(odd_path)
    prepare(config)
    counts = {"sft": 8, "train": 6, "held_out": 4, "unseen_sites": 3, "unseen_functions": 3}
    assert {split: len(load_split(config.tasks, split)) for split in counts} == counts
    files = {path: path.stat().st_mtime_ns for path in odd_path.rglob("*") if path.is_file()}
    config.tasks.dataset, config.tasks.fresh_verifier = "of tasks made elsewhere", False
    prepare(config)
    assert {p: p.stat().st_mtime_ns for p in odd_path.rglob("*") if p.is_file()} == files
    config.tasks.held_out = 2
    prepare(config)
    assert len(load_split(config.tasks, "held_out")) == 2


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    with pytest.raises(TaskError, match="run `prepare`"):
        load_split(config.tasks, "train")
    with pytest.raises(TaskError, match="must be one of"):
        load_split(config.tasks, "tain")
    config.tasks.source = "swesmith"
    with pytest.raises(TaskError, match="or put one file of rows there"):
        prepare(config)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/train.jsonl").write_text("{}\n")
    with pytest.raises(TaskError, match=r"train\.jsonl:1: not a row"):
        load_split(config.tasks, "train")
    config.model.init = "none"
    with pytest.raises(ConfigError, match=r"model\.init=qwen3"):
        prepare(config)


def test_rows_of_swe_smith_load_with_their_prepared_folders(tmp_path: Path) -> None:
    config = TasksConfig(source="swesmith", folder=str(tmp_path))
    row = (
        '{"instance_id": "a__b.1", "repo": "a/b", "patch": "", "image_name": "swebench/x:latest", '
        '"FAIL_TO_PASS": ["t/test_a.py::test_x"], "PASS_TO_PASS": "[\\"t/test_b.py::test_y\\"]", '
        '"problem_statement": "Mend it.", "some_new_column": 3}\n'
    )
    (tmp_path / "train.jsonl").write_text(row)
    (task,) = load_split(config, "train")
    assert task.pass_to_pass == ("t/test_b.py::test_y",)
    assert task.test_files == ("t/test_a.py", "t/test_b.py")
    with pytest.raises(TaskError, match="prepare its repository"):
        image_folder(config, task)
    (tmp_path / "images/a__b.1/testbed").mkdir(parents=True)
    assert image_folder(config, task) == tmp_path / "images/a__b.1"
