"""`python -m ckpt`, which is the command `ckpt`."""

from ckpt.cli.main import main

main()
