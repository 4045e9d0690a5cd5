"""HTML reports about runs and blamed steps, and SNIP's figures in wandb and TensorBoard."""
