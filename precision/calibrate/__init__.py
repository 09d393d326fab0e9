"""Calibrated rounding: what a model's layers meet, kept as sums of products, and codes chosen by them (GPTQ)."""
