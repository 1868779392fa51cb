"""Small bugs, planted one at a time in a copy of the source tree; for each, the tests that must notice it."""
