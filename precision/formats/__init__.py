"""File formats and weight storage: read, quantize and write weights."""
