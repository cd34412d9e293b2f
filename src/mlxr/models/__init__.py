"""Models: families, the components of their layers and the names of their weights, no scheduling. One decoder."""

from mlxr.models.decoder import Decoder
from mlxr.models.families import list_unknown_keys, model_from_folder, model_from_gguf
from mlxr.models.model import Model

__all__ = ["Decoder", "Model", "list_unknown_keys", "model_from_folder", "model_from_gguf"]
