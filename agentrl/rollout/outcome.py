"""The one table of how a trajectory can end, and what each end is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    is_graded: bool
    """The tests decide its reward, and it counts in its group's mean. Else reward is None."""
    is_retried: bool
    meaning: str


RULES: dict[str, Rule] = {
    # The policy's doing: the tests are run on what it left.
    "submitted": Rule(is_graded=True, is_retried=False, meaning="the agent handed in"),
    "turn_limit": Rule(is_graded=True, is_retried=False, meaning="max_turns reached"),
    "token_limit": Rule(is_graded=True, is_retried=False, meaning="tokens_per_trajectory reached"),
    "malformed": Rule(is_graded=True, is_retried=False, meaning="too many malformed replies"),
    "time_limit": Rule(is_graded=True, is_retried=False, meaning="its own time was used up"),
    # Not the policy's doing: never trained, never in a mean, counted.
    "sandbox_start": Rule(is_graded=False, is_retried=True, meaning="no sandbox started"),
    "sandbox_lost": Rule(is_graded=False, is_retried=True, meaning="the sandbox died"),
    "engine_lost": Rule(is_graded=False, is_retried=True, meaning="no engine answered"),
    "grading": Rule(is_graded=False, is_retried=True, meaning="the tests could not be run"),
    "infra": Rule(is_graded=False, is_retried=True, meaning="another failure of ours"),
    "group_timeout": Rule(
        is_graded=False, is_retried=False, meaning="cut at rollout.group_timeout_s"
    ),
    "cancelled": Rule(is_graded=False, is_retried=False, meaning="the run was stopping"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    cause: str
    reward: float | None

    def __post_init__(self) -> None:
        rule = RULES.get(self.cause)
        if rule is None:
            raise ValueError(f"cause={self.cause!r}: must be one of {', '.join(RULES)}")
        if rule.is_graded != (self.reward is not None):
            raise ValueError(
                f"cause={self.cause!r} with reward={self.reward}: "
                f"{'needs a number' if rule.is_graded else 'must be None'}"
            )
