"""Keys of our own for what GGUF has no key for, or none that readers of the family know.

Files that `mlxr convert` makes of folders have them; a key of this kind that is not in the table is refused, as a later
version may have written it. Each is read where a value without it would be the family's usual one, or one that the
names of a file's tensors tell.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxr.core.errors import ModelError
from mlxr.models.fields import NO_ORIGINS, Fields, Origin

OWN = "mlxr."

OWN_KEYS = {
    "activation": "the activation of feed-forward blocks, as Activation spells it",
    "attention.head_norms": "true if queries and keys are normed, in families where this differs",
    "attention.keys_as_values": "true if the values of layers without a window are their keys",
    "attention.output_bias": "true if the product after attention has a bias",
    "attention.qkv_bias": "true if the products of queries, keys and values have biases",
    "attention.scale": "what scores of attention are multiplied by",
    "attention.sliding_window_layers": "a flag for each layer: it has the window",
    "expert_group_count": "groups that experts are chosen by",
    "expert_group_used_count": "groups that a token's experts come from",
    "expert_layers": "a flag for each layer: it has experts",
    "expert_weights_norm": "true if the shares of a token's experts are divided by their sum",
    "expert_weights_scale": "what the shares of experts are multiplied by",
    "feed_forward_bias": "true if the products of feed-forward blocks have biases",
    "output_bias": "true if logits have a bias",
    "parallel_blocks": "true if the two blocks of a layer stand side by side",
    "rope.layers": "a flag for each layer: it rotates queries and keys",
    "rope.scaling.yarn_truncate": "true if yarn's range is rounded to whole pairs",
    "ssm.norm": "true if what Mamba-2 gives is normed",
    "tied_embeddings": "true if the output is the table of embeddings",
}

# Of these the keys without which other programs, who do not read them, compute another model.
NEEDED = frozenset(
    (
        *("activation", "attention.scale", "attention.sliding_window_layers", "rope.layers"),
        *("rope.scaling.yarn_truncate", "expert_group_count", "expert_group_used_count", "expert_weights_norm"),
        "expert_weights_scale",
    )
)


def list_needed(metadata: Mapping[str, object]) -> list[str]:
    """Return the keys without which other programs compute another model."""
    return [key for key in metadata if key.startswith(OWN) and key.removeprefix(OWN) in NEEDED]


def open_own_keys(metadata: Mapping[str, object], origins: Mapping[str, Origin] = NO_ORIGINS) -> Fields:
    """Return the entries of our own. Raises ModelError for one that is not in the table."""
    own = Fields(metadata, OWN, origins)
    for name in own.names():
        if name not in OWN_KEYS:
            raise ModelError(f"{OWN}{name} is there, which this version of mlxr does not know; take a later one")
    return own
