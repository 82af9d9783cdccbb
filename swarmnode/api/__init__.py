"""The HTTP API: OpenAI shapes and administration."""
