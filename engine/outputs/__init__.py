"""From the core's outputs to what users get."""
