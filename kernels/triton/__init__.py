"""The operations as Triton kernels, one a file, for GPUs. Each has its torch reference in the package above."""
