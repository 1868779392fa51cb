"""Fuzzing: altered files of every kind that ckpt reads, before every operation and command that reads them.

Each input must end in the right state or in one `CkptError`: no other error, no crash, no hang, no memory beyond what
the files justify, nothing outside the folder read, written or removed, no code run. `docs/fuzzing.md` has the report.
"""
