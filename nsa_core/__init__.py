"""Native Sparse Attention: the model, its kernels and its trainer. Importing it imports nothing."""

__version__ = "0.1.0"
