"""Where a model's files come from, and what a GGUF file is converted into."""
