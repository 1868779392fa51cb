"""What several benchmarks use: timing, the state that is saved, the libraries that save it, reports."""
