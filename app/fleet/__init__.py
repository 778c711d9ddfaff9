"""Many replicas: messages, routing, load shedding, autoscaling, shared memory budgets. No Ray."""
