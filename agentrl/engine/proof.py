"""What weights one running engine holds: exchanged, and proved before it may serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.engine.admin import EngineAdmin
from agentrl.engine.capabilities import Capabilities
from agentrl.engine.reports import Reports
from agentrl.engine.startup import Leased
from agentrl.errors import VersionError
from agentrl.weights.push import member, read_push
from agentrl.weights.version import Announced

Identity = tuple[int, int, str]
STARTING_MODEL: Identity = (-1, 0, "")
"""Identity of the starting model, before any version was announced."""


def identity_of(announced: Announced | None) -> Identity:
    return STARTING_MODEL if announced is None else announced.identity


@dataclass(slots=True, eq=False)
class EngineWeights:
    """Raises VersionError where an answer does not fit, and what EngineAdmin raises."""

    name: str
    admin: EngineAdmin
    able: Capabilities
    pause_mode: str
    reports: Reports
    loaded: Identity
    """What it was last told to load."""
    proved: Identity | None = None
    is_paused: bool = False
    exchanges: int = 0
    """Begun so far; a probe that one of them overlapped says nothing."""
    node: int = 0
    """Of the engine, as its node calls itself to the trainer."""
    _group: str = ""
    """That it joined for pushes."""
    _own: tuple[str, list[dict[str, Any]]] | None = None
    """At the last proof, where its hashes are not ours: our checksum (empty for the starting model)
    and its answer."""

    @property
    def version(self) -> int:
        return -1 if self.proved is None else self.proved[1]

    async def reach(self, wanted: Callable[[], Announced | None]) -> None:
        """Load and prove until what is proved is what is announced, were it to change meanwhile."""
        while self.proved != identity_of(announced := wanted()):
            self.proved = None
            if self.loaded == identity_of(announced):
                await self._prove(announced, message="")
                self.proved = self.loaded
                self.reports.version(self.name, self.version, "proved")
            elif announced is not None:
                await self._exchange(announced)
            else:
                raise VersionError(
                    f"{self.name}: asked to go back to the starting model; restart it"
                )

    async def _exchange(self, announced: Announced) -> None:
        """Pause, load, prove, continue: nothing is sampled by weights that were not proved."""
        mode = self.able.pause_mode(self.pause_mode)
        self.exchanges += 1
        self.is_paused = True
        self.reports.state(self.name, "paused", self.version)
        await self.admin.pause(mode)
        with Leased(announced, self.name):
            is_flushing = mode != "in_place"
            message = await self._receive(announced, is_flushing=is_flushing)
            if message:
                message = await self.admin.update(
                    announced.folder, announced.version, is_flushing=is_flushing
                )
        self.loaded = announced.identity
        await self._prove(announced, message=message)
        await self.admin.resume()
        self.is_paused = False
        self.proved = announced.identity
        self.reports.version(self.name, self.version, "proved")
        self.reports.state(self.name, "ready", self.version)

    async def _receive(self, announced: Announced, *, is_flushing: bool) -> str:
        """Take part in the push of `announced`; return why not, empty if all of it came."""
        push = None
        if announced.transport == "collective":
            push = read_push(announced.folder.parent)
        mine = member(self.node, self.name, self.admin.url)
        if push is None or mine not in push.ranks:
            return "it is in no push"
        if (push.attempt, push.version) != (announced.attempt, announced.version):
            return f"the push is of version {push.version}"
        why = ""
        if self._group != push.group:
            await self._leave_group()
            why = await self.admin.join_group(push, push.ranks[mine])
            self._group = push.group
        why = why or await self.admin.receive(
            push, has_brackets=self.able.has_update_brackets, is_flushing=is_flushing
        )
        if why:
            self.reports.state(self.name, f"push failed: {why}", self.version)
            await self._leave_group()
        return why

    async def _leave_group(self) -> None:
        if self._group:
            await self.admin.leave_group(self._group)
        self._group = ""

    async def _prove(self, announced: Announced | None, *, message: str) -> None:
        """Compare the engine's own answers with what was announced.

        Where the engine hashes as we do, its checksum must be the announced one. SGLang's hashes
        are its own: there the label must fit, and the hashes must have changed since the last proof
        if and only if our checksum has. That proves that other weights arrived, not which; after a
        start, and after the starting model, whose checksum nobody announced, the label alone. (They
        are taken then too: to compare with, and because the first ones compile a kernel for
        seconds.)
        """
        version = 0 if announced is None else announced.version
        found = await self.admin.weight_version()
        if found != str(version):
            self._refuse(
                version,
                f"version {version} was announced, it answers {found!r}"
                + (f" and said: {message}" if message else ""),
            )
        if announced is None and self.able.checksum == "equal":
            return
        ranks = await self.admin.checksums()
        if announced is None or self.able.checksum == "own":
            self._compare(version, "" if announced is None else announced.checksum, ranks)
            return
        held = [rank.get("checksum") for rank in ranks]
        if not held or any(one != announced.checksum for one in held):
            self._refuse(
                version,
                f"version {version} was announced with checksum {announced.checksum}, it holds "
                f"{held}; compare {announced.folder} with what the trainer wrote",
            )

    def _compare(self, version: int, checksum: str, ranks: list[dict[str, Any]]) -> None:
        before, self._own = self._own, (checksum, ranks)
        if before is None or not before[0]:
            return
        is_other, has_changed = before[0] != checksum, before[1] != ranks
        if is_other and not has_changed:
            self._refuse(version, f"it calls its weights {version}, but they did not change")
        if has_changed and not is_other:
            self._refuse(version, f"its weights changed, but those of {version} are the last ones")

    def _refuse(self, version: int, why: str) -> None:
        self.reports.version(self.name, version, "refused")
        raise VersionError(f"{self.name}: {why}")
