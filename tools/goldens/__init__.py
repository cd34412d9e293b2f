"""The tiny models whose logits are stored: one row a case, in a file for each group of families.

A case is a `config.json`. Scaling rules get original contexts shorter than the prompt, so that they show.
"""

from __future__ import annotations

from goldens import gemma, latent, llama, mixtures, others, recurrent
from goldens.config import Config

__all__ = ["CASES"]

CASES: dict[str, Config] = llama.CASES | gemma.CASES | others.CASES | mixtures.CASES | recurrent.CASES | latent.CASES
