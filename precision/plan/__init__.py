"""Plans: rules, device and model resolved to a storage, compute and accumulation per layer, each with its reason."""
