"""The run directory: the writer, the readers, and new Problems from what a run stored."""
