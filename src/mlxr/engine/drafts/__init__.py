"""Drafts: tokens that an answer may have next, guessed without the model, which the model then checks in one pass.

A draft changes no answer. The engine computes the logits after each drafted token and draws from them as it would have
drawn one token at a time; as soon as the draw is another token than the drafted one, the rest of the draft is dropped.
"""

from mlxr.engine.drafts.drafter import Drafter, DrafterMaker

__all__ = ["Drafter", "DrafterMaker"]
