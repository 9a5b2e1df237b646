"""Builders of schedules, one a file, and what is true of all of them: verify and reverse."""
