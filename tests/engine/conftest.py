"""Real engine processes on a tiny random model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.engine.loaded import LoadedModel, read_tensors
from agentrl.weights.version import Announced, publish_version

VOCABULARY = 300
CONTEXT = 256
SERVED_CONTEXT = 1024
"""Of servers: room for a request that outlasts a test process that has to wait for a core."""


def make_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("engine") / "model", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture, other weights."""
    return make_model(tmp_path_factory.mktemp("engine") / "other", seed=1)


@pytest.fixture(scope="session")
def loaded(model: Path) -> LoadedModel:
    torch.set_num_threads(1)
    return LoadedModel(model, version="0", context=CONTEXT)


@pytest.fixture(scope="session")
def reference(model: Path) -> Callable[..., list[float]]:
    """Log-probabilities by transformers' own forward, without any cache."""
    whole = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def score(tokens: list[int], start: int, temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            logits = whole(torch.tensor([tokens])).logits[0] / (temperature or 1.0)
        table = torch.log_softmax(logits, -1)
        return [float(table[at - 1, tokens[at]]) for at in range(start, len(tokens))]

    return score


@dataclass
class Reply:
    status: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


def ask(url: str, body: object | None = None) -> Reply:
    """GET, or POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Reply(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.read().decode())


@dataclass
class Server:
    """An engine process and what a test asks of it."""

    process: subprocess.Popen[bytes]
    url: str

    def post(self, path: str, **body: Any) -> Reply:
        return ask(self.url + path, body)

    def get(self, path: str) -> Reply:
        return ask(self.url + path)

    def generate(self, ids: list[int], new: int = 8, **params: Any) -> dict[str, Any]:
        answer = self.post("/generate", **generate_body(ids, new, **params))
        assert answer.status == 200, answer.text
        return dict(answer.json())

    def load(self) -> dict[str, Any]:
        return dict(self.get("/v1/loads").json()["loads"][0])

    def wait_for_running(self, count: int, deadline_s: float = 60) -> None:
        until = time.monotonic() + deadline_s
        while self.load()["num_running_reqs"] != count:
            assert time.monotonic() < until, f"{self.load()} never had {count} running"


def generate_body(
    ids: list[int], new: int, rid: str | None = None, **params: Any
) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True, **params}
    return {"input_ids": ids, "rid": rid, "return_logprob": True, "sampling_params": sampling}


def start_server(model: Path, folder: Path, *flags: str) -> Server:
    ready = folder / "ready.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "agentrl.engine.server", "--model", str(model)),
            *(
                "--context-length",
                str(SERVED_CONTEXT),
                "--ready-file",
                str(ready),
                "--watch-stdin",
                *flags,
            ),
        ],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not ready.exists():
        assert process.poll() is None, f"the server ended with {process.returncode}"
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.05)  # between looks at the file
    return Server(process, json.loads(ready.read_text())["url"])


@pytest.fixture(scope="session")
def _server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(model, tmp_path_factory.mktemp("server"))
    yield server
    assert server.process.stdin is not None
    server.process.stdin.close()  # the tie to this process
    server.process.wait(timeout=60)


@pytest.fixture
def server(_server: Server, model: Path) -> Iterator[Server]:
    """The shared server, given back unpaused, idle, with the first model's weights."""
    yield _server
    _server.post("/abort_request", abort_all=True)
    _server.post("/continue_generation")
    _server.post("/update_weights_from_disk", model_path=str(model), weight_version="0")
    _server.get("/flush_cache")


@pytest.fixture
def announce(tmp_path: Path) -> Callable[..., Announced]:
    """Publish a model's weights as a version of a run."""

    def publish(source: Path, version: int) -> Announced:
        return publish_version(
            tmp_path / "weights",
            run="test",
            attempt=1,
            version=version,
            step=version,
            tensors=read_tensors(source),
            model_folder=source,
            consumed=[],
        )

    return publish


async def eventually(claim: Callable[[], bool], *, deadline_s: float = 60, what: str = "") -> None:
    """Wait until `claim` holds."""
    until = asyncio.get_running_loop().time() + deadline_s
    while not claim():
        assert asyncio.get_running_loop().time() < until, f"never came true: {what}"
        await asyncio.sleep(0.02)


@pytest.fixture
def start_engine() -> Callable[..., Server]:
    return start_server
