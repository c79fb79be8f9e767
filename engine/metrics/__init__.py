"""Figures about the engine's work: collected by the output processor, handed out by loggers and `get_metrics()`."""
