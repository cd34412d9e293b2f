"""Folders of Hugging Face models, which enter as GGUF files do.

`metadata` maps `config.json` to the metadata that a GGUF file of the model has, `tensors` the folder's tensors to those
of that file. What loads, converts or shows a model reads these alone, so a folder is loaded as it is converted.
"""

from mlxr.models.folders.metadata import config_from_hf, read_config, read_folder
from mlxr.models.folders.statement import Statement
from mlxr.models.folders.tensors import arrange_folder, convert_tensors, state_drafting

__all__ = [
    "Statement",
    "arrange_folder",
    "config_from_hf",
    "convert_tensors",
    "read_config",
    "read_folder",
    "state_drafting",
]
