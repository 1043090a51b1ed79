"""What can be tuned: our own Triton kernel and the engines' kernels."""
