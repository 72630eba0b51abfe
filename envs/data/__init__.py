"""Tasks from data: where they lie, how rows are read, how a row becomes a task, in which order tasks come."""
