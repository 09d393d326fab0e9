"""LoRAs of 8-bit weights: left out of the weights and added to the results of their layers."""
