"""Hooks: how weft intercepts torch modules, probes them, and shares random numbers between ranks."""
