"""Simulator of many replicas in one thread: the real router, scheduler, block pool and autoscaling policy; steps only
advance the simulated time."""
