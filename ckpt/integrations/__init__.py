"""The manager in the training code that people already have."""
