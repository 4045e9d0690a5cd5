"""Statistics of one update: recorded by each linear, and reduced over the parallel groups to one table on rank 0."""
