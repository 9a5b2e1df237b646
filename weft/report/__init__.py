"""Report: what a run did or would do, as a page, as figures and in the terminal."""
