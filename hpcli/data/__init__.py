"""Training data as NumPy arrays: the same global batch whatever the number of ranks."""
