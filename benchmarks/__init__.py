"""Measurements of ckpt beside other libraries and against an earlier commit: `python -m benchmarks --help`."""
