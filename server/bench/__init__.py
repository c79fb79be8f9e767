"""`corespan bench`: a server under load, and the engine alone, measured in vLLM's terms."""
