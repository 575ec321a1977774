"""GPU kernels of this package, and the rewriting of traced functions that puts them to use."""
