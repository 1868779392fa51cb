"""A fault-injection campaign: thousands of faults, and what became of the checkpoints after each.

    python -m tests.campaign --trials 2000 --seed 1 --report report.md
    python -m tests.campaign --only power --index 17 --seed 1

Every trial is a function of (seed, kind, index). It runs in a process that is forked from one that has imported torch,
so that a trial takes a fraction of a second.
"""
