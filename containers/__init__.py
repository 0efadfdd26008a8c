"""Images in which every role of a run runs: definitions, building, reading, entering one."""
