"""LoRA adapters: their files, their weights, and which of them are in memory."""
