"""Results of llama.cpp's libmtmd for pictures: the rows of a tower, and a model's logits for the text around them.

llama-cpp-python has the library where it was built with LLAVA_BUILD; MTMD_CPP_LIB names another folder with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp as mtmd
from llama_losses import ignore_log
from numpy.typing import NDArray

MARK = "<__media__>"
Chunk = list[int] | NDArray[np.float32]  # tokens of a text, or the rows of a picture


class Eyes:
    """A tower in a file `mmproj`, with the text model that it belongs to."""

    def __init__(self, mmproj: Path, llama: llama_cpp.Llama, threads: int = 2, *, rounds: bool = False) -> None:
        mtmd.mtmd_log_set(ignore_log, ctypes.c_void_p(0))
        mtmd.mtmd_helper_log_set(ignore_log, ctypes.c_void_p(0))
        params = mtmd.mtmd_context_params_default()
        params.use_gpu, params.warmup, params.n_threads, params.print_timings = False, False, threads, False
        if not rounds:  # keys and values to f16, as it does for speed
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.llama, self._context = llama, mtmd.mtmd_init_from_file(str(mmproj).encode(), llama.model, params)
        if self._context is None:
            raise ValueError(f"libmtmd does not open {mmproj}")

    def split(self, text: str, pictures: list[NDArray[np.uint8]]) -> Iterator[Any]:
        """Split a text with marks for pictures into chunks; each is valid until the next one."""
        bitmaps = []
        for pixels in pictures:
            height, width, _ = pixels.shape
            data = (ctypes.c_ubyte * pixels.size).from_buffer_copy(np.ascontiguousarray(pixels))
            bitmaps.append(mtmd.mtmd_bitmap_init(width, height, data))
        chunks = mtmd.mtmd_input_chunks_init()
        data = text.encode()
        given = mtmd.mtmd_input_text(text=data, text_len=len(data), add_special=False, parse_special=True)
        array = (mtmd.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
        assert mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(given), array, len(bitmaps)) == 0
        for index in range(mtmd.mtmd_input_chunks_size(chunks)):
            yield mtmd.mtmd_input_chunks_get(chunks, index)
        mtmd.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            mtmd.mtmd_bitmap_free(bitmap)

    def is_picture(self, chunk: Any) -> bool:
        """Return True if a chunk is a picture, not a text."""
        return bool(mtmd.mtmd_input_chunk_get_type(chunk) != mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT)

    def encode(self, chunk: Any) -> NDArray[np.float32]:
        """The rows of a picture, with those for later layers beside them."""
        assert mtmd.mtmd_encode_chunk(self._context, chunk) == 0
        rows = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        columns = llama_cpp.llama_model_n_embd_inp(self.llama.model)
        found = mtmd.mtmd_get_output_embd(self._context)
        return np.ctypeslib.as_array(found, (rows, columns)).copy()

    def read(self, text: str, pictures: list[NDArray[np.uint8]]) -> tuple[list[Chunk], NDArray[np.float64]]:
        """Return the text's tokens and the pictures' rows, and the loss of each token that follows one of the text."""
        context = self.llama._ctx.ctx
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        words, past, losses, before = list[Chunk](), 0, list[float](), None
        for chunk in self.split(text, pictures):
            if self.is_picture(chunk):
                words.append(self.encode(chunk))
                behind = llama_cpp.llama_pos()
                done = mtmd.mtmd_helper_eval_chunk_single(
                    self._context, context, chunk, past, 0, 512, True, ctypes.byref(behind)
                )
                assert done == 0
                past, before = behind.value, None  # the helper keeps no logits of a picture
                continue
            count = ctypes.c_size_t()
            found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            tokens = [found[at] for at in range(count.value)]
            words.append(tokens)
            self._decode(tokens, past)
            for at, token in enumerate(tokens):
                if before is not None:
                    peak = before.max()
                    losses.append(float(np.log(np.exp(before - peak).sum()) + peak - before[token]))
                before = self._take_logits(at)
            past += len(tokens)
        return words, np.array(losses)

    def _decode(self, tokens: list[int], past: int) -> None:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.logits[at] = token, past + at, 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        assert llama_cpp.llama_decode(self.llama._ctx.ctx, batch) == 0
        llama_cpp.llama_batch_free(batch)

    def _take_logits(self, at: int) -> NDArray[np.float64]:
        size = llama_cpp.llama_vocab_n_tokens(self.llama._model.vocab)
        found = llama_cpp.llama_get_logits_ith(self.llama._ctx.ctx, at)
        return np.ctypeslib.as_array(found, (size,)).astype(np.float64)

    def close(self) -> None:
        """Free the tower."""
        mtmd.mtmd_free(self._context)
