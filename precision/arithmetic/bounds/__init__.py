"""What is known of the values of tensors without a look at them, and how it is carried through model code."""
