"""Benchmarks: `python -m benchmarks.NAME [--quick] [--device cpu]`. Never run by the tests."""
