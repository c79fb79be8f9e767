"""Structured outputs: answers held to a JSON schema, a regular expression, a list of choices or a grammar."""
