"""The embedded engine as a process, over HTTP."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.loaded import read_tensors
from agentrl.weights.version import tensor_checksum

pytestmark = pytest.mark.slow  # a server in a process of its own

LONG = 900
"""New tokens of a request that is still running when the next call arrives."""


@pytest.fixture
def pool(server: Any) -> Any:
    """Threads for requests; those that still run at the end are given up, paused or not."""
    with ThreadPoolExecutor(16) as pool:
        yield pool
        server.post("/abort_request", abort_all=True)
        server.post("/continue_generation")


def start(server: Any, pool: ThreadPoolExecutor, count: int, **params: Any) -> list[Future[Any]]:
    """Begin `count` long requests, and wait until they run."""
    started = [
        pool.submit(server.generate, [at + 1] * 5, LONG, rid=f"long-{at}-", **params)
        for at in range(count)
    ]
    server.wait_for_running(count)
    return started


def meta(answer: Any) -> Any:
    return answer["meta_info"]


def test_an_answer_carries_tokens_and_their_log_probabilities(
    server: Any, reference: Callable[..., list[float]]
) -> None:
    answer = server.generate([5, 6, 7], 10, temperature=0.7)
    ids, found = answer["output_ids"], meta(answer)["output_token_logprobs"]
    expected = reference([5, 6, 7, *ids], 3, 0.7)
    assert [token for _, token, _ in found] == ids
    assert max(abs(a - b) for (a, _, _), b in zip(found, expected, strict=True)) < 1e-4
    assert meta(answer)["finish_reason"] == {"type": "length", "length": 10}
    assert (meta(answer)["prompt_tokens"], meta(answer)["completion_tokens"]) == (3, 10)
    assert meta(answer)["weight_versions"] == [{"version": "0", "start": 0, "end": 10}]


def test_a_stop_token_is_named(server: Any) -> None:
    stop = server.generate([5, 6], 9, sampling_seed=4)["output_ids"][3]
    answer = server.generate([5, 6], 9, sampling_seed=4, stop_token_ids=[stop])
    assert meta(answer)["finish_reason"] == {"type": "stop", "matched": stop}


def test_abort_matches_by_prefix(server: Any, pool: ThreadPoolExecutor) -> None:
    rids = ("r1", "r10", "s1")
    started = {rid: pool.submit(server.generate, [3], LONG, rid=rid) for rid in rids}
    server.wait_for_running(3)
    assert server.post("/abort_request", rid="r1").status == 200
    kinds = {rid: meta(one.result())["finish_reason"]["type"] for rid, one in started.items()}
    assert kinds == {"r1": "abort", "r10": "abort", "s1": "length"}


def test_an_empty_rid_aborts_nothing(server: Any, pool: ThreadPoolExecutor) -> None:
    [started] = start(server, pool, 1)
    server.post("/abort_request", rid="")
    assert meta(started.result())["finish_reason"]["type"] == "length"


def test_a_pause_with_abort_gives_partial_answers(server: Any, pool: ThreadPoolExecutor) -> None:
    started = start(server, pool, 3)
    server.post("/pause_generation", mode="abort")
    for answer in (one.result() for one in started):
        assert meta(answer)["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == len(meta(answer)["output_token_logprobs"]) < LONG


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_the_other_pauses_let_requests_finish_whole(
    server: Any, pool: ThreadPoolExecutor, mode: str
) -> None:
    calm = server.generate([1] * 5, LONG, sampling_seed=0)["output_ids"]
    started = start(server, pool, 2, sampling_seed=0)
    server.post("/pause_generation", mode=mode)
    flushed = server.get("/flush_cache").status
    assert flushed == (400 if mode == "in_place" else 200)
    server.post("/continue_generation")
    assert started[0].result()["output_ids"] == calm
    assert meta(started[1].result())["num_retractions"] == (mode == "retract")


def test_a_request_during_a_pause_is_held(server: Any, pool: ThreadPoolExecutor) -> None:
    server.post("/pause_generation", mode="retract")
    held = pool.submit(server.generate, [1, 2], 3)
    while server.load()["num_waiting_reqs"] != 1:
        assert not held.done()
    assert server.get("/health").status == 503
    assert server.get("/ready").status == 503
    server.post("/continue_generation")
    assert len(held.result()["output_ids"]) == 3
    assert server.get("/health").status == 200


def test_a_client_that_leaves_ends_its_request(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"input_ids":[1],"sampling_params":{"max_new_tokens":1000,"ignore_eos":true}}'
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        server.wait_for_running(1)
        before = aborted(server)  # while it is connected: the abort may come at once
    until = time.monotonic() + 60
    while aborted(server) != before + 1:
        assert time.monotonic() < until, "the request goes on"
        time.sleep(0.02)


def aborted(server: Any) -> float:
    lines = server.get("/metrics").text.splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith("sglang:num_aborted_requests_t")
    )


def test_an_update_while_paused_splits_the_versions(
    server: Any, pool: ThreadPoolExecutor, other_model: Path
) -> None:
    [started] = start(server, pool, 1)
    server.post("/pause_generation", mode="retract")
    done = server.post("/update_weights_from_disk", model_path=str(other_model), weight_version="7")
    assert (done.status, done.json()["success"]) == (200, True)
    server.post("/continue_generation")
    first, second = meta(started.result())["weight_versions"]
    assert (first["version"], first["start"], second["version"]) == ("0", 0, "7")
    assert first["end"] == second["start"] < second["end"] == LONG
    assert server.get("/model_info").json() == {
        "model_path": str(other_model),
        "weight_version": "7",
    }


def test_in_place_an_update_is_done_but_the_flush_is_refused(
    server: Any, pool: ThreadPoolExecutor, other_model: Path
) -> None:
    start(server, pool, 1)
    server.post("/pause_generation", mode="in_place")
    answer = server.post(
        "/update_weights_from_disk", model_path=str(other_model), weight_version="7"
    )
    assert (answer.status, answer.json()["success"]) == (400, False)
    assert "not flushed" in answer.json()["message"]
    assert server.get("/model_info").json()["weight_version"] == "7"


def test_an_unpaused_update_waits_for_what_runs_and_holds_what_comes(
    server: Any, pool: ThreadPoolExecutor, other_model: Path
) -> None:
    [running] = start(server, pool, 1)
    update = pool.submit(
        server.post, "/update_weights_from_disk", model_path=str(other_model), weight_version="7"
    )
    later = pool.submit(server.generate, [1], 2)
    assert update.result().status == 200
    assert running.done() or running.result()
    assert [span["version"] for span in meta(running.result())["weight_versions"]] == ["0"]
    assert meta(later.result())["weight_version"] in {"0", "7"}


def test_bad_weights_are_refused_and_the_old_ones_go_on(server: Any, tmp_path: Path) -> None:
    before = server.post("/weights_checker", action="checksum").json()
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    for folder in (tmp_path, tmp_path / "missing"):
        answer = server.post("/update_weights_from_disk", model_path=str(folder))
        assert (answer.status, answer.json()["success"]) == (400, False)
        assert str(folder) in answer.json()["message"]
    assert server.post("/weights_checker", action="checksum").json() == before
    assert server.generate([1, 2])["output_ids"]


def test_the_checksum_is_that_of_the_files(server: Any, model: Path) -> None:
    [rank] = server.post("/weights_checker", action="checksum").json()["ranks"]
    assert rank["checksum"] == tensor_checksum(read_tensors(model))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [1] * 1024}, "The input (1024 tokens) is longer than the model's context"),
        (
            {"input_ids": [1] * 1018, "sampling_params": {"max_new_tokens": 7}},
            "exceeds the model's maximum context length of 1024",
        ),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [300]}, "input_ids hold 300"),
        ({"input_ids": "text"}, "Expected `array`"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature=-1"),
        ({"input_ids": [1], "stream": True}, "does not stream"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_400(server: Any, body: Any, words: str) -> None:
    answer = server.post("/generate", **body)
    assert answer.status == 400
    assert words in answer.json()["error"]["message"]


def test_unknown_keys_are_ignored(server: Any) -> None:
    assert server.post("/generate", input_ids=[1], novelty=1).status == 200


def test_metrics_carry_sglangs_names(server: Any) -> None:
    server.generate([1, 2, 3], 4)
    text = server.get("/metrics").text
    for name in ("num_running_reqs", "generation_tokens_total", "token_usage"):
        assert f"\nsglang:{name} " in text


def test_the_server_ends_when_its_parent_is_gone(
    model: Path, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    server = start_engine(model, tmp_path)
    server.process.stdin.close()
    assert server.process.wait(timeout=60) == -signal.SIGKILL


def test_sigterm_ends_the_server_cleanly(
    model: Path, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    server = start_engine(model, tmp_path)
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0
