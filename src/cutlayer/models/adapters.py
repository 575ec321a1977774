"""Low-rank adapters (LoRA) with peft: added to a decoder, and exported as a folder that peft can load."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cutlayer.errors import ConfigError
from cutlayer.models.decoders import CausalLM, anatomy_of

TARGETS = ("q_proj", "v_proj")  # the query and value projections, as all known families call them


def needs(package: str) -> Any:
    """Import a package that only language models need, or say how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"language models need {package}, which is missing; install it with: pip install 'cutlayer[llm]'"
        ) from error


def adapted(base: Any, *, rank: int, alpha: float, targets: tuple[str, ...] = ()) -> Any:
    """Return the decoder with y = W x + (alpha / rank) B A x at linear layers of these names; only A and B train."""
    targets = targets or TARGETS
    _check_targets(base, targets)
    peft = needs("peft")
    settings = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, settings)


def _check_targets(base: Any, targets: tuple[str, ...]) -> None:
    """Refuse targets outside of the decoder's layers: a tied embedding would need it on both sides of a cut."""
    paths = [path for path, module in anatomy_of(base).blocks.named_modules() if isinstance(module, nn.Linear)]
    known = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    for target in targets:
        if not any(f".{path}".endswith(f".{target}") for path in paths):
            raise ConfigError(
                f"the adapter target {target!r} matches no linear layer of {type(base).__name__}; "
                f"its layers have {', '.join(known)}."
            )


def export_pretrained(model: CausalLM, state_dict: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write the trained values as a folder for the unsplit model.

    peft.PeftModel.from_pretrained loads the folder of adapters; transformers loads that of a model that was trained in
    full. The state dict is that of the whole model, as a run or Split.export returns it.
    """
    ours = {id(tensor): name for name, tensor in model.named_parameters()}
    lost = [name for name in ours.values() if name not in state_dict]
    if lost:
        raise ConfigError(f"the state dict has no {lost[0]!r}: give that of the whole model, from Split.export")
    theirs = {name: state_dict[ours[id(tensor)]] for name, tensor in model.base.named_parameters()}
    model.base.save_pretrained(str(folder), state_dict=theirs)
