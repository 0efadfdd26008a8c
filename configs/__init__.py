"""Choices in YAML; the schema is agentrl.config."""
