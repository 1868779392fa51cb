"""`python -m ckpt`, which is the command `ckpt`."""

from ckpt.cli.main import main

if __name__ == "__main__":  # not where a tool imports every module of the package
    main()
