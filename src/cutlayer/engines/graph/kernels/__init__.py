"""Operations that this package computes by kernels of its own on a GPU, and where a traced function uses them."""
