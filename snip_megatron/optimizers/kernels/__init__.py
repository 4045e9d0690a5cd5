"""The drift of AdamW's update as a Triton kernel. Nothing in this package is imported where Triton cannot run."""
