"""Opens what all attempts of one process share, and closes it again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.agent.prompts import Prompts
from agentrl.agent.tokens import ChatTokens
from agentrl.config import RunConfig
from agentrl.engine.client import EngineClient
from agentrl.engine.experts import ModelExperts
from agentrl.events import Writer
from agentrl.rollout.attempt import Workshop
from agentrl.rollout.infra import InfraWindow
from agentrl.sandbox.admission import Admission
from agentrl.sandbox.provider import open_provider
from agentrl.tasks.load import image_folder


@asynccontextmanager
async def open_workshop(
    config: RunConfig,
    *,
    node: int,
    urls: Callable[[], Sequence[str]],
    weights: Callable[[], str] | None = None,
    leases: Path,
    events: Writer,
    temperature: float | None = None,
    tokenizer: Path | None = None,
    experts: ModelExperts | None = None,
) -> AsyncIterator[Workshop]:
    """Yield the workshop of one process; its sandboxes are closed at the end.

    urls: the engines to use now. weights: the name of what they proved to hold. tokenizer: folder
    that has it; None is model.path. experts: those of the model, where trajectories are to tell
    which of them each token took. Raises TemplateError, SandboxUnavailable.
    """
    tokens = ChatTokens.load(tokenizer or Path(config.model.path), mode=config.agent.mode)
    prompts = Prompts.load(Path(config.agent.prompts))
    starts = Admission.of(config.sandbox)
    provider = open_provider(
        config.sandbox,
        run=config.name,
        leases=leases,
        concurrency=config.rollout.concurrency,
        admission=starts,
    )
    try:
        async with EngineClient(
            urls, config.engine, events, weights=weights, experts=experts
        ) as engine:
            yield Workshop(
                config=config,
                node=node,
                provider=provider,
                engine=engine,
                tokens=tokens,
                prompts=prompts,
                image_of=lambda task: image_folder(config.tasks, task),
                events=events,
                infra=InfraWindow(
                    window=config.rollout.infra_window, max_rate=config.rollout.max_infra_rate
                ),
                starts=starts,
                temperature=temperature,
                takes_patches=config.rollout.take_patches,
            )
    finally:
        await provider.close()
