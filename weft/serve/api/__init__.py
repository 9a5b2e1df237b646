"""HTTP interface of the server: an OpenAI-compatible API and its checks, over one engine."""
