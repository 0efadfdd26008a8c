"""One module for each thing that a person or a job starts."""
