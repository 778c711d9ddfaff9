"""Memory backends: `base` (the interface), `host`, `cuda`, and `select`, which chooses one for a device."""
