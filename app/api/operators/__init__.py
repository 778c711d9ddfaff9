"""Routes for operators: models, adapters, pins, budget, load, metrics and health."""
