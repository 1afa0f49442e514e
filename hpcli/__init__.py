"""hpcli: a command-line training driver over hyper_parallel that shows the gradient norm of every rank."""

__version__ = "0.1.0"
