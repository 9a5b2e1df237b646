"""Benchmarks: one file a question, each printing measured, peer and limit side by side."""
