"""Compute plans and accumulation around each call of a model."""
