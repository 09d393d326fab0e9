"""Short runs of a sampler that measure layers, or storages and compute dtypes, of a loaded model, or calibrate it."""
