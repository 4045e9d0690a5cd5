"""HTML reports about runs, and SNIP's figures in wandb and TensorBoard."""
