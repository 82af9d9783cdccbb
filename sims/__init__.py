"""Latency studies in virtual time: the product's own machines over simulated links and stage costs."""
