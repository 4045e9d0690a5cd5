"""Statistics: recorded by each linear, reduced over the parallel groups to one table on rank 0."""
