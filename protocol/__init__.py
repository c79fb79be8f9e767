"""What crosses the bridge between shell and core, and nothing else: messages, parameters, configuration, codec."""
