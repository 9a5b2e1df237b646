"""Benchmarks: one file a question, each printing measured, peer and limit side by side."""

import os

os.environ["WEFT_PLANS"] = "off"  # ranks inherit it: no benchmark reads or writes the user's plans
