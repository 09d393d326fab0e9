"""Layer analysis: measure the error of each layer in a candidate precision, and choose rules."""
