"""Speculative decoding: drafts are tokens that an answer may have next, which the model checks in one pass.

A draft changes no answer. The engine computes the logits after each drafted token and draws from them as it would have
drawn one token at a time; as soon as the draw is another token than the drafted one, the rest of the draft is dropped.
"""

from mlxr.engine.speculative.drafters import Drafter, DrafterMaker

__all__ = ["Drafter", "DrafterMaker"]
