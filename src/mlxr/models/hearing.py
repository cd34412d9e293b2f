"""The part of a model that hears: frames of a sound in, rows out that take the place of embeddings.

An ear is three lists of steps (`mlxr.models.tower`): those before its layers, the layers, between which it may be
stopped, and those behind them. A family's file states its ears (`EarFamily`): their sizes in files `mmproj`
(https://github.com/ggml-org/llama.cpp, tools/mtmd) and in folders of Hugging Face, and the names of tensors in both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from mlxr.core.errors import DeviceError, ModelError
from mlxr.core.frozen import frozen
from mlxr.kernels.context import Context
from mlxr.kernels.tensor import FloatArray, TensorSource
from mlxr.models.components import Norms, Weights
from mlxr.models.components.weights import Tensors
from mlxr.models.fields import Fields
from mlxr.models.model import Model
from mlxr.models.tower import Step, Words

RATE, MOST_SAMPLES = 16_000, 30 * 16_000  # of a sound, and of a piece that is heard at once
SoundRule = Mapping[str, float | str]  # settings of frames for `mlxr.pictures.sounds`


@frozen
class EarSpec:
    """The sizes of an ear, and its steps."""

    columns: int  # of the text's stream
    numbers: int  # of a frame
    shrink: int  # frames that become one row
    words: Words
    rule: SoundRule
    layers: tuple[Step, ...]
    begin: tuple[Step, ...] = ()
    end: tuple[Step, ...] = ()

    def count_rows(self, frames: FloatArray) -> int:
        """Return the number of rows that these frames (N, numbers) become."""
        return -(-len(frames) // self.shrink)

    def fit(self, model: Model) -> None:
        """Raise ModelError unless the text of `model` takes this ear's rows."""
        if self.columns != model.hidden:
            raise ModelError(
                f"the rows of its ear are {self.columns} wide, those of the model {model.hidden}; take the file of the "
                "same model"
            )

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in order."""
        return (*self.begin, *self.layers, *self.end)

    def tensors(self) -> Tensors:
        """List the tensors of all steps."""
        for step in self.steps:
            yield from step.tensors()


@frozen
class EarFamily:
    """Ears of one kind."""

    projector: str  # `clip.audio.projector_type` of their GGUF files
    model_types: tuple[str, ...]  # `model_type` of folders that have one
    read_gguf: Callable[[Fields, Mapping[str, TensorSource]], EarSpec]  # from the keys of a file, and its tensors
    read_folder: Callable[[Fields, Fields], EarSpec]  # from `config.json` and its `audio_config`
    name_gguf: Callable[[Mapping[str, TensorSource]], dict[str, TensorSource]]  # tensors by the names of the steps
    name_folder: Callable[[Mapping[str, TensorSource]], dict[str, TensorSource]]


class Ear:
    """An ear with the sizes of `spec` ready to run on the CPU, from `tensors` by the names of its steps.

    Raises ModelError for tensors that do not fit the sizes, DeviceError on a GPU.
    """

    ctx: Context
    _steps: list[Callable[[Context, FloatArray], FloatArray]]

    def __init__(self, ctx: Context, spec: EarSpec, tensors: Mapping[str, TensorSource]) -> None:
        if ctx.gpu is not None:
            raise DeviceError("the steps that hear are those of processors alone")
        weights = Weights(ctx, dict(tensors))
        weights.check("", spec.tensors())
        own = weights.of_model(Norms(1e-6))
        self.ctx, self.spec = ctx, spec
        self._steps = [step.load(own) for step in spec.steps]

    def encode(self, frames: FloatArray) -> Generator[None, None, FloatArray]:
        """Compute the rows (rows, columns) of frames (N, numbers).

        It may be stopped after each step, as a tower after each layer. The bits are the same whatever is done
        meanwhile, and on any number of threads.
        """
        for step in self._steps:
            frames = step(self.ctx, frames)
            yield
        return frames


def list_projectors(families: Sequence[EarFamily]) -> str:
    """Name the kinds of ears, for errors."""
    return ", ".join(family.projector for family in families)
