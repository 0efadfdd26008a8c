"""What counts as proof: a server that answers as SGLang does, and does not do as it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl.engine.admin import EngineAdmin, open_session
from agentrl.engine.capabilities import capabilities
from agentrl.engine.proof import STARTING_MODEL, EngineWeights
from agentrl.engine.reports import Reports
from agentrl.errors import VersionError
from agentrl.events import NoEvents
from agentrl.weights.push import Bucket, Push, member, tell_push
from agentrl.weights.version import Announced

OLD, NEW = "old", "new"
Act = Callable[["Sglang"], web.Response]


@dataclass
class Sglang:
    """Holds `weights` under `label`; `update` and `bucket` are what it does when asked to load."""

    update: Act
    bucket: Act = lambda server: said("no bucket was expected", 400)
    weights: str = OLD
    label: str = "0"
    asked: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path == "/model_info":
            return web.json_response({"weight_version": self.label})
        if request.path == "/weights_checker":
            return web.json_response({"ranks": [{"checksums": {"w": self.weights}}]})
        if request.path == "/update_weights_from_disk":
            return self.update(self)
        if request.path == "/update_weights_from_distributed":
            return self.bucket(self)
        return said("done")

    @asynccontextmanager
    async def engine(self) -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with open_session() as session:
            yield EngineWeights(
                name="engine-0",
                admin=EngineAdmin(session, url, update_timeout_s=30),
                able=capabilities("0.5.23"),
                pause_mode="retract",
                reports=Reports(NoEvents()),
                loaded=STARTING_MODEL,
            )
        await runner.cleanup()


def said(message: str, status: int = 200) -> web.Response:
    return web.json_response({"success": status == 200, "message": message}, status=status)


def loads(server: Sglang) -> web.Response:
    server.weights, server.label = f"{NEW} {server.label}", str(int(server.label) + 1)
    return said("Succeeded")


def loads_and_answers_400(server: Sglang) -> web.Response:
    loads(server)
    return said("weights are new, the cache was not flushed", 400)


def only_says_so(server: Sglang) -> web.Response:
    server.label = str(int(server.label) + 1)
    return said("Succeeded")


def ignores(server: Sglang) -> web.Response:
    return said("Succeeded")


def refuses(server: Sglang) -> web.Response:
    return said("size mismatch for model.norm.weight", 400)


@pytest.fixture
def version(tmp_path: Path) -> Callable[..., Announced]:
    def announced(number: int, checksum: str, transport: str = "disk") -> Announced:
        folder = tmp_path / "weights" / f"v{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        return Announced(
            version=number, step=number, folder=folder, run="t", attempt=1, checksum=checksum,
            files={}, transport=transport,
        )  # fmt: skip

    return announced


def reach(server: Sglang, versions: Sequence[Announced | None]) -> EngineWeights:
    """Go from one version to the next; return how the engine stands then."""

    async def go() -> EngineWeights:
        async with server.engine() as weights:
            weights.loaded = STARTING_MODEL if versions[0] is None else versions[0].identity
            for one in versions:
                await weights.reach(lambda one=one: one)
            return weights  # type: ignore[no-any-return]

    return asyncio.run(go())


Version = Callable[..., Announced]


def test_other_hashes_under_the_new_label_are_proof(version: Version) -> None:
    weights = reach(Sglang(loads), [version(0, "a"), version(1, "b"), version(2, "c")])
    assert (weights.version, weights.is_paused) == (2, False)


def test_weights_that_are_new_are_kept_whatever_the_status_says(version: Version) -> None:
    assert reach(Sglang(loads_and_answers_400), [version(0, "a"), version(1, "b")]).version == 1


def test_an_engine_that_answers_200_and_did_not_load_is_refused_and_stays_paused(
    version: Version,
) -> None:
    server = Sglang(only_says_so)
    with pytest.raises(VersionError, match="calls its weights 1, but they did not change"):
        reach(server, [version(0, "a"), version(1, "b")])
    assert "/continue_generation" not in server.asked


@pytest.mark.parametrize("act", [ignores, refuses], ids=["200", "400"])
def test_an_old_label_is_refused_in_the_engines_words(version: Version, act: Act) -> None:
    with pytest.raises(
        VersionError, match=r"version 1 was announced, it answers '0' and said: S|s"
    ):
        reach(Sglang(act), [version(0, "a"), version(1, "b")])


def test_a_step_that_changed_nothing_is_no_fault(version: Version) -> None:
    """As a learning rate so small that bfloat16 does not tell the tensors apart."""
    assert reach(Sglang(only_says_so), [version(0, "a"), version(1, "a")]).version == 1


def test_hashes_that_change_while_the_tensors_do_not_are_refused(version: Version) -> None:
    with pytest.raises(VersionError, match="its weights changed"):
        reach(Sglang(loads), [version(0, "a"), version(1, "a")])


def test_the_starting_model_may_be_what_the_first_version_holds(version: Version) -> None:
    assert reach(Sglang(only_says_so, label="0"), [None, version(1, "a")]).version == 1


def push_to(server_url: str, announced: Announced) -> None:
    bucket = Bucket(names=["w"], dtypes=["float32"], shapes=[[1]])
    tell_push(
        announced.folder.parent,
        Push(
            attempt=1, version=announced.version, group="g", address="127.0.0.1", port=1,
            backend="gloo", ranks={member(0, "engine-0", server_url): 1}, buckets=[bucket],
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bucket", "from_disk"), [(loads, False), (refuses, True)], ids=["it came", "it failed"]
)
def test_a_push_that_failed_is_read_from_disk(
    version: Version, bucket: Act, from_disk: bool
) -> None:
    server = Sglang(loads, bucket=bucket)
    first, second = version(0, "a"), version(1, "b", transport="collective")

    async def go() -> int:
        async with server.engine() as weights:
            weights.loaded = first.identity
            await weights.reach(lambda: first)
            push_to(weights.admin.url, second)
            await weights.reach(lambda: second)
            return int(weights.version)

    assert asyncio.run(go()) == 1
    assert ("/update_weights_from_disk" in server.asked) == from_disk
    assert ("/destroy_weights_update_group" in server.asked) == from_disk


def test_no_request_to_an_engine_goes_over_a_connection_that_it_may_just_be_closing() -> None:
    closed = asyncio.Semaphore(0)
    rests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        rests.append(await reader.read())
        closed.release()
        writer.close()

    async def go() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with open_session() as session:
            admin = EngineAdmin(session, url, update_timeout_s=30)
            for _ in range(3):
                await admin.resume()
        server.close()
        for _ in range(3):
            await closed.acquire()

    asyncio.run(asyncio.wait_for(go(), 60))
    assert [rest.count(b"POST") for rest in rests] == [0, 0, 0]  # a body, and never another request
