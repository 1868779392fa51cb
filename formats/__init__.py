"""How state is laid out as bytes. Knows nothing of storage or of training.

Importing this package imports no torch, so that `ckpt ls` starts at once; its modules are imported by name.
"""
