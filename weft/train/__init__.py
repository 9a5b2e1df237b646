"""Train: data made on the spot, and an eye that tells whether a model learned it."""
