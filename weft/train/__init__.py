"""Train video models, with attention that becomes sparse where that is faster."""
