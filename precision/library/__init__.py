"""Storage and compute dtypes for modules of plain torch, put on and taken off with one call each."""
