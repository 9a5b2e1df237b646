"""Switching the sharded dim: models whose modules mix one dim at a time."""
