"""Operations on all named tensors of a model.

An engine with its own mapping of tensors registers its own versions (`functools.singledispatch`).
"""

from functools import singledispatch

from cutlayer.core.state import Tensors


@singledispatch
def leaves(params: Tensors) -> Tensors:
    """Return the parameters as leaves to differentiate with respect to."""
    return {name: value.detach().requires_grad_() for name, value in params.items()}


@singledispatch
def typed(params: Tensors, gradients: Tensors) -> Tensors:
    """Convert gradients to the types of their parameters, which may have been differentiated in another type."""
    return {name: gradient.to(params[name].dtype) for name, gradient in gradients.items()}


@singledispatch
def copies(values: Tensors, names: tuple[str, ...]) -> Tensors:
    """Return copies of the values of these names."""
    return {name: values[name].clone() for name in names}
