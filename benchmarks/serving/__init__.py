"""The server over HTTP: cost, latency, streams, faults."""
