"""Every error this project raises on purpose: one root, and each kind is also a builtin."""

from __future__ import annotations


class AgentRLError(Exception):
    """Root of all. Message: what was asked, what was found, what to do."""


class ConfigError(AgentRLError, ValueError):
    """A key or value that the schema, or another key, does not allow."""


class TaskError(AgentRLError, ValueError):
    """A task that cannot decide anything: its tests pass before the fix, or fail after it."""


class InfraError(AgentRLError, RuntimeError):
    """What the policy cannot cause. Never a reward: reward None, counted under `cause`."""

    cause = "infra"


class SandboxUnavailable(InfraError):
    """This machine cannot give the isolation that was asked for."""

    cause = "sandbox_start"


class SandboxStartError(InfraError):
    """One sandbox did not start."""

    cause = "sandbox_start"


class SandboxLost(InfraError, ConnectionError):
    """A started sandbox is gone; what it was running has no result."""

    cause = "sandbox_lost"


class EngineLost(InfraError, ConnectionError):
    """No engine could answer a request within the retry budget."""

    cause = "engine_lost"


class RequestRefused(AgentRLError, ValueError):
    """An engine refused a request as it stands (HTTP 400): sending it again cannot help."""


class GradingError(InfraError):
    """The tests could not be run to a verdict."""

    cause = "grading"


class TemplateError(AgentRLError, ValueError):
    """A chat template under which earlier tokens change when a message is appended."""


class RecordError(AgentRLError, ValueError):
    """A file of a run (spool, version, checkpoint) that is torn or not what it says it is."""


class PublishError(AgentRLError, OSError):
    """A file of a run could not be written whole; what was published before it is intact."""


class HandoffError(AgentRLError, ConnectionError):
    """A group that the trainer refused, or a key or endpoint of it that can't be trusted."""


class NoSignalError(AgentRLError, RuntimeError):
    """Batch after batch had no group that teaches: all attempts got the same reward."""


class DivergedError(AgentRLError, ArithmeticError):
    """A loss or a gradient that is not a finite number."""


class CheckpointError(RecordError):
    """No checkpoint could be verified."""


class VersionError(AgentRLError, RuntimeError):
    """An engine did not prove the version that was announced."""


class WaitTimeout(AgentRLError, TimeoutError):
    """A bounded wait ended; the message names who was missing."""


class TooManyInfraFailures(AgentRLError, RuntimeError):
    """The share of infrastructure failures passed the limit; the message is the table of causes."""


class Interrupted(AgentRLError):
    """A signal asked for the end; everything is saved and the process exits with 75."""


class LaunchError(AgentRLError, RuntimeError):
    """A role ended in a way that no restart can mend."""


class NetworkError(InfraError):
    """No address of the nodes can be trusted to be each one's own and to reach the others."""

    cause = "network"


class ClusterError(AgentRLError, RuntimeError):
    """The small Slurm cluster of this machine cannot be started, is not up, or is up already."""


class ImageError(ConfigError):
    """An image that is not whole, is not of this machine's kind, or in which no role can run."""


class SpecError(ConfigError):
    """A job that Slurm would refuse, or would take to mean something else."""


class SubmitError(AgentRLError, RuntimeError):
    """sbatch, scancel or scontrol refused; the message is in its own words."""


class QueryError(InfraError, ConnectionError):
    """Slurm could not be asked for the state of a job. It says nothing about the job."""

    cause = "slurm"


NEVER_MENDS = (ConfigError, TaskError, TemplateError, SandboxUnavailable)
"""What a process that starts again would raise again: a person has to change something first."""
