"""Traces of real runs, calibration of links, kernels and hosts, comparison with one process."""
