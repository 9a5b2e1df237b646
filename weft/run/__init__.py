"""Do: the only room that touches tensors and processes."""
