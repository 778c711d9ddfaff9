"""Tensor parallelism: one model over several ranks, processes with a device each, which compute every step together.

Rank 0 is the engine: it schedules and allocates KV memory; the peers execute its orders.
"""
