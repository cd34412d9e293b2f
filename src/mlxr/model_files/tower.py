"""The files of a model's tower, by which it sees, and of its ear, by which it hears: beside the model, or in its
folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from mlxr.core.errors import FormatError, ModelError
from mlxr.core.frozen import frozen
from mlxr.core.types import is_tower_file, rank_tower_file
from mlxr.formats import GGUFFile, SafetensorsFolder, hash_tensors, open_gguf
from mlxr.formats.safetensors import read_json_object
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import TensorSource
from mlxr.model_files.files import name_in_errors
from mlxr.models import Model
from mlxr.models.families import fit_tower, read_folder_ear, read_folder_tower, read_gguf_ear, read_gguf_tower
from mlxr.models.hearing import Ear, EarFamily, EarSpec
from mlxr.models.tower import Tower, TowerFamily, TowerSpec

_PARTS = "visual.", "vision_", "embed_vision.", "audio_tower.", "embed_audio."  # of names of tensors in folders


@frozen(eq=False, slots=False)
class TowerFile:
    """The sizes and tensors of a tower; `beside` is its file if it has one of its own.

    With it comes an `ear`, or a reason why there is none, `deaf`.
    """

    family: TowerFamily
    spec: TowerSpec
    tensors: Mapping[str, TensorSource]
    path: Path
    beside: GGUFFile | None = None
    ear: tuple[EarFamily, EarSpec] | None = None
    deaf: str = ""

    @cached_property
    def fingerprint(self) -> bytes:
        """A hash of all that can change a row but the kernels, which the model's own fingerprint names."""
        digest = hashlib.blake2b(repr((self.spec, self.ear and self.ear[1])).encode(), digest_size=32)
        if self.beside is not None:  # else the model's fingerprint has its tensors
            digest.update(hash_tensors(self.beside.tensors, self.beside.paths))
        return digest.digest()

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in the file; in a folder they lie among those of the text."""
        own = self.tensors.items()
        return sum(one.nbytes for name, one in own if self.beside is not None or any(part in name for part in _PARTS))

    def count_work_bytes(self, tokens: int, *, on_gpu: bool = False) -> int:
        """Return the most bytes that encoding a picture of so many tokens takes, with the rows that it becomes.

        For each patch these are its position, the stream, a block's result, queries, keys and values, two of them in
        pages, and a feed-forward block before and after its activation. On a GPU, 16 bits come on top for each pair of
        patches, which hide the patches that merely fill a picture up (`attend.gpu`).
        """
        spec, patches = self.spec, tokens * self.spec.merge**2
        seen = 2 * min(patches, spec.side**2 if spec.positions == "own" else patches) ** 2 if on_gpu else 0
        return 4 * (patches * (9 * spec.hidden + 2 * spec.features) + tokens * spec.row_numbers) + seen

    def load(self, ctx: Context) -> Tower:
        """Prepare the tower; raises ModelError, naming the tensor, if it does not fit."""
        rename = self.family.name_folder if self.beside is None else self.family.name_gguf
        with name_in_errors(self.path):
            return Tower(ctx, self.spec, rename(self.spec, self.tensors))

    def load_ear(self, ctx: Context) -> Ear:
        """Prepare the ear, which must be there; raises ModelError, naming the tensor, if it does not fit."""
        assert self.ear is not None
        family, spec = self.ear
        rename = family.name_folder if self.beside is None else family.name_gguf
        with name_in_errors(self.path):
            return Ear(ctx, spec, rename(self.tensors))

    def close(self) -> None:
        """Close its own file."""
        if self.beside is not None:
            self.beside.close()


def take_gguf_tower(file: GGUFFile, model: Model) -> TowerFile:
    """Return the tower in an opened `mmproj` file for `model`. Raises ModelError."""
    family, spec = read_gguf_tower(file.metadata, file.tensors)
    fit_tower(family, spec, model)
    ear, deaf = read_gguf_ear(file.metadata, file.tensors, model)
    return TowerFile(family, spec, file.tensors, file.paths[0], file, ear, deaf)


def take_folder_tower(folder: SafetensorsFolder, preprocessor: Mapping[str, object], model: Model) -> TowerFile | None:
    """Return the tower of an opened folder for its `model`, None without one. Raises ModelError."""
    found = read_folder_tower(folder.config, preprocessor)
    if found is None:
        return None
    family, spec = found
    fit_tower(family, spec, model)
    ear, deaf = read_folder_ear(folder.config, model)
    return TowerFile(family, spec, folder.tensors, folder.paths[0].parent, None, ear, deaf)


MMPROJ = "mmproj*.gguf"


def find_tower(
    path: Path,
    opened: GGUFFile | SafetensorsFolder,
    model: Model,
    mmproj: str | Path | None = None,
    recorded: Path | None = None,
) -> tuple[TowerFile | None, str]:
    """Return the tower of a model; or None and why it has none: the place where it was looked for, and what would help.

    A file that is named as `mmproj` must have a tower that fits; raises NotFound, FormatError or ModelError. Files
    beside a model are never refused, as they may belong to another one; nor is a `recorded` file, which is used instead
    of those.
    """
    if mmproj is not None:
        return _open_tower(Path(mmproj).expanduser(), model), ""
    try:
        if isinstance(opened, SafetensorsFolder):
            named = path / "preprocessor_config.json"
            tower = take_folder_tower(opened, read_json_object(named) if named.is_file() else {}, model)
            return tower, "" if tower else f"{path / 'config.json'} has no vision_config"
        beside = [recorded] if recorded else [one for one in path.parent.glob("*.gguf") if is_tower_file(one.name)]
        found = sorted(beside, key=lambda one: rank_tower_file(one.name))
        if not found:
            return None, f"there is no file {MMPROJ} beside {path}; put its vision tower there, or name it with mmproj"
        reasons = []
        for one in found:
            try:
                return _open_tower(one, model), ""
            except (ModelError, FormatError) as error:
                reasons.append(str(error))
        return None, reasons[0]
    except (ModelError, FormatError) as error:
        return None, str(error)


def _open_tower(path: Path, model: Model) -> TowerFile:
    file = open_gguf(path)
    try:
        with name_in_errors(path):
            return take_gguf_tower(file, model)
    except BaseException:
        file.close()
        raise
