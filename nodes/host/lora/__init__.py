"""LoRAs and other weight patches of 8-bit weights: kept beside the weights and added to the results of their layers."""
