"""Deployments of Ray Serve: ingress, engine replica, and every other module that imports Ray."""
