"""The engine over HTTP: OpenAI's and Anthropic's APIs, probes, metrics and controls, on Starlette and uvicorn."""
