"""Where a model's commands run: one interface, several back ends. No grading."""
