"""Logits processors: the interface for users' own (`interface`), and those that every engine has (`builtin`)."""

from .interface import AddedRequest, BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["AddedRequest", "BatchUpdate", "LogitsProcessor", "MoveDirectionality"]
