"""A folder for the PYTHONPATH of commands."""
