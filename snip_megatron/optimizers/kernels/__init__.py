"""The update error of AdamW as a Triton kernel. Nothing in this package is imported where Triton cannot run."""
