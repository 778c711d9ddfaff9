"""What quantised weights and caches cost in quality, on real models: `python -m benchmarks.quality`."""
