"""The guard around a model's, a VAE's and a text encoder's calls."""
