"""The loop of one attempt: prompts, tool calls, the append-only token buffer. No engine code."""
