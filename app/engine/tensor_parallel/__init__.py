"""One model over several ranks: processes with a device each, which compute every step together.

Rank 0 is the engine itself. It has the scheduler and the books of the KV memory; the peers do what it says.
"""
