"""Model versions on their way from trainer to engines."""
