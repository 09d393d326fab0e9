"""LoRAs and other weight patches of 8-bit weights: kept unmerged and added to the results of their layers."""
