"""Architectures: structure and weight names, no scheduling. One decoder, configured by a row and a file's numbers."""

from mlxr.models.config import ModelConfig
from mlxr.models.decoder import Decoder
from mlxr.models.folders.metadata import config_from_hf
from mlxr.models.gguf_config import config_from_gguf, list_unknown_keys

__all__ = ["Decoder", "ModelConfig", "config_from_gguf", "config_from_hf", "list_unknown_keys"]
