"""Jobs of `benchmarks.gpu_day`."""
