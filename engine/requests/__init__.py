"""From a prompt and its parameters to a request for the core."""
