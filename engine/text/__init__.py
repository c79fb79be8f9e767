"""Between text and token ids: tokenizers, prompts, chats, and text out of tokens."""
