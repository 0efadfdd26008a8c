"""Logs of other stacks as our events: one module a format, and nothing that is guessed."""
