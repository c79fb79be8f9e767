"""Speculative decoding: drafts of a request's next tokens, which the model then checks several at a time."""
