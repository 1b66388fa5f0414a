"""Prometheus metrics that API and workers have in common; each process registers them in its own registry."""
