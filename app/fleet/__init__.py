"""Many replicas as one: what they report, which of them gets a request, how many there should be. No Ray."""
