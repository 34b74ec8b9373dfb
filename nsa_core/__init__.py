"""Native Sparse Attention: the model, its kernels and its trainer. Importing this imports nothing else."""

__version__ = "0.1.0"
