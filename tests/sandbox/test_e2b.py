"""What is E2B's own: its keys, its refusals, its leases, and how it loses sandboxes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from boxes import NO_E2B, Box, until
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SandboxLost, SandboxStartError, SandboxUnavailable
from agentrl.sandbox import lease
from agentrl.sandbox.backoff import FIRST_WAIT_S, LONGEST_WAIT_S, wait_s
from agentrl.sandbox.e2b_sdk import open_sdk
from agentrl.sandbox.e2b_template import name_of

pytest.importorskip("e2b", reason=NO_E2B)


REFERENCE = "docker://lab/adder:1"


@pytest.fixture
def e2b(image: Path, leases: Path, bubble: Box) -> Box:
    """On a machine with bwrap, which the loopback server's sandboxes are made by."""
    return Box("e2b", image, leases, "any-template")


@given(st.integers(1, 60), st.floats(0, 1))
def test_waits_grow_to_a_bound_and_are_spread(attempt: int, draw: float) -> None:
    full = min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S)
    assert full / 2 <= wait_s(attempt, draw) <= full


def test_a_create_that_is_refused_for_now_is_asked_again(e2b: Any) -> None:
    async def body(provider: Any) -> Any:
        e2b.service.faults.refuse_creates = 6
        sandbox = await provider.start(e2b.image, owner="0/0/0")
        return await sandbox.exec("cat a.txt", timeout_s=30)

    assert e2b.provider(body).output == "one\n"


def test_a_service_that_refuses_until_the_deadline_is_a_start_error(e2b: Any) -> None:
    async def body(provider: Any) -> None:
        e2b.service.faults.refuse_creates = 10_000
        with pytest.raises(SandboxStartError, match="start_timeout_s=2"):
            await provider.start(e2b.image, owner="0/0/0")
        assert e2b.has_nothing()

    e2b.set(start_timeout_s=2.0).provider(body)


def test_a_sandbox_that_is_created_after_the_deadline_is_ended(e2b: Any) -> None:
    async def body(provider: Any) -> None:
        e2b.service.faults.create_delay_s = 2.0
        with pytest.raises(SandboxStartError, match="start_timeout_s=1"):
            await provider.start(e2b.image, owner="0/0/0")
        await until(lambda: e2b.service.keys)
        await until(e2b.has_nothing)

    e2b.set(start_timeout_s=1.0).provider(body)


def test_a_create_whose_answer_is_lost_makes_one_sandbox(e2b: Any) -> None:
    """It is asked again under the key by which the service knows that it has made one."""

    async def body(provider: Any) -> None:
        e2b.service.faults.lose_creates = 1
        await provider.start(e2b.image, owner="0/0/0")
        assert len(e2b.service.machines) == 1

    e2b.provider(body)
    assert e2b.has_nothing()


@pytest.fixture
def built(e2b: Box, tmp_path: Path) -> Box:
    """Over an image of a registry, of which a template has to be built."""
    return e2b.set(environment=REFERENCE, images=str(tmp_path / "images"))


def templates(box: Any) -> list[str]:
    return [machine.wish["templateID"] for machine in box.service.machines.values()]


@pytest.mark.slow
def test_a_template_is_built_of_a_tasks_image_once_though_refused_at_first(built: Any) -> None:
    async def body(provider: Any) -> None:
        built.service.faults.refuse_builds = 1
        starts = [provider.start(built.image, owner=f"0/0/{n}") for n in range(3)]
        await asyncio.gather(*starts)
        assert built.service.templates == {name_of(REFERENCE): "lab/adder:1"}
        assert templates(built) == 3 * [name_of(REFERENCE)]

    built.provider(body)


@pytest.mark.slow
def test_an_image_of_which_no_template_can_be_built_is_told(built: Any) -> None:
    async def body(provider: Any) -> None:
        built.service.faults.missing_images = frozenset({"lab/adder:1"})
        with pytest.raises(SandboxStartError, match=r"lab/adder:1.*image lab/adder:1 not found"):
            await provider.start(built.image, owner="0/0/0")

    built.provider(body)
    assert not any(Path(built.config.images).iterdir())


def test_templates_want_a_folder_that_the_nodes_share(built: Any) -> None:
    with pytest.raises(SandboxStartError, match=r"sandbox\.images is empty"):
        built.set(images="").sh("true")


def test_a_cut_connection_is_a_lost_sandbox_and_no_observation(e2b: Any) -> None:
    async def body(sandbox: Any) -> None:
        e2b.service.faults.cut_commands = 1
        with pytest.raises(SandboxLost, match="gone"):
            await sandbox.exec("true", timeout_s=30)

    e2b.run(body)


@pytest.mark.slow
def test_a_command_past_its_time_is_no_lost_sandbox(e2b: Any) -> None:
    async def body(sandbox: Any) -> Any:
        e2b.service.faults.stall_commands = 1
        slow = await sandbox.exec("true", timeout_s=0.1)
        return slow, await sandbox.exec("echo alive", timeout_s=30)

    slow, after = e2b.run(body)
    assert (slow.timed_out, after.output) == (True, "alive\n")


def test_a_heartbeat_renews_the_lease_and_a_close_ends_it(e2b: Any) -> None:
    async def body(sandbox: Any) -> None:
        machine = e2b.service.machines[sandbox.id]
        first, seen = machine.ends, machine.renewals
        await until(lambda: machine.renewals > seen + 1)
        assert machine.ends > first
        await sandbox.close()
        assert e2b.service.machines == {}

    e2b.set(lease_s=12.0).run(body)


def test_a_sweep_ends_what_a_dead_owner_left_at_the_service(e2b: Any) -> None:
    async def body(provider: Any) -> None:
        await provider.start(e2b.image, owner="0/0/0")
        (path,) = e2b.leases.glob("*.json")
        claim = lease.read(path)
        assert claim
        (machine,) = e2b.service.machines.values()
        assert machine.wish["metadata"][lease.LABEL] == claim.id
        assert await asyncio.to_thread(lease.end, e2b.leases, claim) == 1
        assert e2b.has_nothing()

    e2b.provider(body)


def test_a_missing_key_says_which_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(SandboxUnavailable, match="E2B_API_KEY is not set"):
        open_sdk(1)


def test_the_sdk_is_imported_with_a_pool_as_wide_as_the_run() -> None:
    program = (
        "from agentrl.sandbox.e2b_sdk import open_sdk; open_sdk(1234); "
        "import e2b.api; print(e2b.api.max_connections)"
    )
    env = {**os.environ, "E2B_API_KEY": "e2b_x"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1234\n"


def test_a_pool_that_came_too_narrow_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_x")
    open_sdk(1)
    with pytest.raises(SandboxUnavailable, match="E2B_MAX_CONNECTIONS=100000"):
        open_sdk(100_000)
    assert os.environ.get("E2B_MAX_CONNECTIONS") != "100000"
