"""The evaluations of PagedAttention's and vAttention's papers, repeated: `python -m benchmarks.papers`."""
