"""Serving a model: client, router, supervisor, and the embedded torch server."""
