"""The models that hpcli trains, each described once: sizes, parameter names, NumPy initialisation, modules."""
