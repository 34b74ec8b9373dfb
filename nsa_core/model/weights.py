"""The weights of a model by name: read for a checkpoint, and copied back from one."""

from torch import Tensor, nn


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Weights and persistent buffers by name, each shared tensor once."""
    unique: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        unique.setdefault(id(tensor), name)
    return {name: state[name].detach() for name in unique.values()}


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy weights into a model in place.

    Raises:
        ValueError: If names or shapes differ; the first difference is named.
    """
    own = model_tensors(model)
    if own.keys() != tensors.keys():
        name = min(own.keys() ^ tensors.keys())
        side = "the model has" if name in own else "the checkpoint has"
        message = f"tensor `{name}` is on one side only: {side} it"
        raise ValueError(message)
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            message = (
                f"tensor `{name}` has shape {list(tensors[name].shape)} in the checkpoint "
                f"and {list(tensor.shape)} in the model"
            )
            raise ValueError(message)
        tensor.copy_(tensors[name])
