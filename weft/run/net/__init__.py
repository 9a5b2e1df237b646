"""Channels between processes: listeners, mutual authentication, TLS, stores and private folders."""
