"""Weights made for a model. May import base, files, formats and devices; plans say what is made."""
