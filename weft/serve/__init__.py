"""serve: an OpenAI-compatible server over a group of weft ranks."""
