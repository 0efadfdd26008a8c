"""What is Docker's own: its networks, its labels, and a daemon that is not there."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from boxes import Box, needs_docker, until

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxStartError, SandboxUnavailable
from agentrl.sandbox import lease
from agentrl.sandbox.docker import Docker, open_client
from agentrl.sandbox.watch import watch

pytest.importorskip("docker", reason="docker-py is not installed: `pip install 'docker>=7,<8'`")


def test_no_daemon_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxUnavailable, match=r"no daemon answers.*start dockerd"):
        Docker(SandboxConfig(kind="docker"))


@pytest.fixture
def docker(image: Path, leases: Path, request: pytest.FixtureRequest) -> Box:
    return Box("docker", image, leases, request.getfixturevalue("docker_image"))


@needs_docker
def test_no_network_is_made_for_a_sandbox(docker: Any) -> None:
    async def body(provider: Any) -> int:
        for number in range(3):
            await provider.start(docker.image, owner=f"0/{number}/0")
        return len(open_client().api.networks())

    before = len(open_client().api.networks())
    assert docker.provider(body) == before


@needs_docker
def test_a_container_that_outlived_its_owner_is_swept(docker: Any) -> None:
    claim = replace(lease.new(run="r", owner="0/0/0", kind="docker"), owner_start=1)
    lease.publish(docker.leases, claim)
    api = open_client().api
    made = api.create_container(
        docker.config.environment, ["sleep", "1000"], labels={lease.LABEL: claim.id}
    )
    api.start(made["Id"])
    assert "1 sandboxes of docker ended" in lease.sweep(docker.leases)[0]
    assert api.containers(all=True, filters={"label": f"{lease.LABEL}={claim.id}"}) == []


def claim_of(box: Box) -> lease.Lease:
    (path,) = box.leases.glob("*.json")
    claim = lease.read(path)
    assert claim
    return claim


@needs_docker
def test_bytes_over_the_limit_end_what_runs_and_are_said(docker: Any) -> None:
    async def body(provider: Any) -> Any:
        sandbox = await provider.start(docker.image, owner="0/0/0")
        measure, held = Docker(docker.config).measure, {sandbox: claim_of(docker)}
        watching = asyncio.create_task(watch(held, measure, limit_mb=5, interval_s=0.1))
        done = await sandbox.exec("head -c 9000000 /dev/zero > /root/big; sleep 60", timeout_s=60)
        watching.cancel()
        return done, await sandbox.exec("true", timeout_s=30)

    done, after = docker.provider(body)
    assert "over the limit of 5 MiB" in done.output
    assert (done.timed_out, done.oom, after.exit_code) == (False, False, 126)


@needs_docker
def test_one_that_goes_on_writing_past_twice_the_limit_is_ended(docker: Any) -> None:
    async def body(sandbox: Any) -> None:
        sandbox.full = "it was"
        held = {sandbox: claim_of(docker)}
        watching = asyncio.create_task(
            watch(held, lambda claims: {claims[0].id: 11}, limit_mb=5, interval_s=0)
        )
        await until(lambda: not any(docker.leases.iterdir()))
        watching.cancel()
        assert (await sandbox.exec("true", timeout_s=30)).exit_code == 126

    docker.run(body)


@needs_docker
def test_an_image_that_nobody_has_is_a_start_error(docker: Any) -> None:
    with pytest.raises(SandboxStartError, match=r"docker pull localhost:1/none"):
        docker.set(environment="localhost:1/none:latest").sh("true")
