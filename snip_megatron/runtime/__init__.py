"""The loop of a run: the work of every rank at a step boundary, and the further work of rank 0."""
