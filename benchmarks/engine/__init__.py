"""One engine in one process: kernels, memory, mapping, scheduling, throughput."""
