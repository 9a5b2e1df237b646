"""Models: how a sharded sequence runs through modules that know nothing of it."""
