"""Many replicas in one thread: the real router, scheduler, block pool and autoscaling policy, and steps that only take
their time."""
