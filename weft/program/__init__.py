"""What one rank does when it runs a schedule: lowered once, run, timed, traced and proved."""
