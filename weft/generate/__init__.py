"""Generate images and videos from a checkpoint, and resume after any step on other ranks."""
