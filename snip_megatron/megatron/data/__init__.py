"""Text for Megatron: corpora, tokenizer, datasets."""
