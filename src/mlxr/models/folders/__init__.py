"""Folders of Hugging Face models, which enter as GGUF files do.

`metadata` maps `config.json` to the metadata that a GGUF file of the model has, by the functions of the families;
`config` has what several of them share. `tensors` makes the folder's tensors those of that file. What loads, converts
or shows a model reads these alone, so a folder is loaded as it is converted.
"""
