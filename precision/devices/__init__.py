"""Device profiles, detection, executed probes and memory."""
