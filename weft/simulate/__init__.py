"""Time a schedule on a cluster that we may not have."""
