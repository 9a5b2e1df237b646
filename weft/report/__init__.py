"""Reports of measured and simulated runs: a page, figures, a Perfetto trace and terminal views."""
