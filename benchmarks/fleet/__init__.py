"""Many replicas and many models: routing, autoscaling, agents, shelves; simulated and real."""
