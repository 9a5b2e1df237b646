"""Decide: who computes what, by which strategy."""
