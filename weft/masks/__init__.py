"""Producers of block masks, one a file."""
