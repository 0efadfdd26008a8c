"""What is Docker's own: its networks, its labels, and a daemon that is not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from boxes import Box, needs_docker

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxStartError, SandboxUnavailable
from agentrl.sandbox import lease
from agentrl.sandbox.docker import Docker, open_client

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


@needs_docker
def test_an_image_that_nobody_has_is_a_start_error(docker: Any) -> None:
    with pytest.raises(SandboxStartError, match=r"docker pull localhost:1/none"):
        docker.set(environment="localhost:1/none:latest").sh("true")
