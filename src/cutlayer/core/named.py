"""What is done to the named tensors of a model as a whole.

An engine that keeps them in a mapping of its own registers its own way for it (`functools.singledispatch`).
"""

from functools import singledispatch

from cutlayer.core.state import Tensors


@singledispatch
def leaves(params: Tensors) -> Tensors:
    """The parameters as what to differentiate by."""
    return {name: value.detach().requires_grad_() for name, value in params.items()}


@singledispatch
def typed(params: Tensors, gradients: Tensors) -> Tensors:
    """Gradients in the types of their parameters: some may have been differentiated by in another one."""
    return {name: gradient.to(params[name].dtype) for name, gradient in gradients.items()}


@singledispatch
def copies(values: Tensors, names: tuple[str, ...]) -> Tensors:
    """Copies of the values of these names."""
    return {name: values[name].clone() for name in names}
