"""What to solve and how it is graded: task records, loaders, the repair generator, splits."""
