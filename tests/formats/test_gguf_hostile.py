"""GGUF files that are broken or lie: each is a FormatError with file, field and offset, and takes next to no memory."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    make_gguf,
    pack_array,
    pack_entry,
    pack_info,
    pack_text,
    sample_gguf,
)

from mlxr.core.errors import FormatError
from mlxr.formats import open_gguf
from mlxr.formats.ggml_types import UNSUPPORTED_TYPES

HUGE = (1 << 64) - 1
ENTRY = 24  # where the first metadata entry of a file starts, or the first tensor info of one without metadata
ONE_TENSOR = pack_info("t", [32], 0, 0)
SAMPLE = sample_gguf()


@pytest.fixture(autouse=True)
def _little_memory_and_time() -> Iterator[None]:
    """No lie may make the reader allocate or work much: all files here have a few KB."""
    tracemalloc.start()
    began_s = time.monotonic()
    yield
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert time.monotonic() - began_s < 60  # not a measure of speed: a reader that trusts a count would never end


def refuse(tmp_path: Path, content: bytes, field: str, offset: int | None, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    assert (caught.value.field, caught.value.offset) == (field, offset), str(caught.value)
    assert reason in caught.value.reason
    assert caught.value.path == str(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(path))


class TestContainer:
    def test_empty(self, tmp_path: Path) -> None:
        refuse(tmp_path, b"", "file", 0, "is empty")

    def test_wrong_magic(self, tmp_path: Path) -> None:
        refuse(tmp_path, b"GGML" + SAMPLE[4:], "magic", 0, "is b'GGML', not b'GGUF': this is not a GGUF file")

    def test_big_endian(self, tmp_path: Path) -> None:
        content = b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
        refuse(tmp_path, content, "version", 4, "is big endian; only little-endian GGUF files are supported")

    @pytest.mark.parametrize("version", [0, 1, 4, 1 << 31])
    def test_other_versions(self, tmp_path: Path, version: int) -> None:
        reason = "big endian" if version == 1 << 31 else f"is {version}; supported are 2 and 3"
        refuse(tmp_path, make_gguf(version=version), "version", 4, reason)

    @pytest.mark.parametrize("count", [HUGE, 1 << 40, 2])
    def test_lying_counts(self, tmp_path: Path, count: int) -> None:
        refuse(tmp_path, make_gguf(tensor_count=count), "tensor count", 8, f"claims {count} tensors")
        refuse(tmp_path, make_gguf(entry_count=count), "metadata count", 16, f"claims {count} metadata entries")

    def test_too_many_entries(self, tmp_path: Path) -> None:
        """A count that a very long file could hold is refused before anything is read."""
        path = tmp_path / "model.gguf"
        path.write_bytes(make_gguf(entry_count=(1 << 20) + 1))
        os.truncate(path, 1 << 30)  # sparse
        with pytest.raises(FormatError, match="claims 1048577 metadata entries; 1048576 are allowed"):
            open_gguf(path)

    def test_a_folder_and_a_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(FormatError, match="file: is not a regular file"):
                open_gguf(path)

    def test_every_truncation(self, tmp_path: Path) -> None:
        """Cut anywhere in header or tensors, the file is refused; only the padding after the last may be missing."""
        path = tmp_path / "model.gguf"
        path.write_bytes(SAMPLE)
        with open_gguf(path) as file:
            source = file.tensors["mxfp4.weight"]
            end = SAMPLE.index(source.data.tobytes()) + source.nbytes
            header_end = SAMPLE.index(file.tensors["f32.weight"].data.tobytes())
        for length in [*range(1, header_end + 64), *range(header_end + 64, end, 17), end - 1]:
            path.write_bytes(SAMPLE[:length])
            with pytest.raises(FormatError, match=r"at byte \d+: .*(wants|claims|ends at)"):
                open_gguf(path)
        path.write_bytes(SAMPLE[:end])
        open_gguf(path).close()


class TestMetadata:
    def refuse_entry(self, tmp_path: Path, entry: bytes, field: str, offset: int, reason: str) -> None:
        refuse(tmp_path, make_gguf([entry], [], bytes(64)), field, offset, reason)

    @pytest.mark.parametrize("length", [HUGE, 1 << 62, 70000, 0])
    def test_absurd_keys(self, tmp_path: Path, length: int) -> None:
        entry = pack_entry(b"k" * (70000 if length == 70000 else 1), U8, b"\0", key_length=length)
        self.refuse_entry(tmp_path, entry, "metadata key 0", ENTRY, f"has {length} bytes; 1 to 65535 are allowed")

    def test_a_key_past_the_end(self, tmp_path: Path) -> None:
        entry = pack_entry("k", U8, b"\0", key_length=60000)
        self.refuse_entry(tmp_path, entry, "metadata key 0", ENTRY, "claims 60000 bytes of text, more than fit in the")

    def test_a_key_that_is_no_text(self, tmp_path: Path) -> None:
        self.refuse_entry(tmp_path, pack_entry(b"k\xff", U8, b"\0"), "metadata key 0", ENTRY, "is not UTF-8")

    def test_a_key_twice(self, tmp_path: Path) -> None:
        entry = pack_entry("key", U8, b"\0")
        refuse(tmp_path, make_gguf([entry, entry]), "metadata 'key'", ENTRY + len(entry), "is there twice")

    def test_unknown_value_types(self, tmp_path: Path) -> None:
        self.refuse_entry(tmp_path, pack_entry("k", 13, b"\0"), "metadata 'k'", ENTRY + 9, "has unknown value type 13")
        entry = pack_entry("k", ARRAY, pack_array(0xFFFFFFFF, []))
        self.refuse_entry(tmp_path, entry, "metadata 'k'", ENTRY + 13, "has unknown value type 4294967295")

    @pytest.mark.parametrize("length", [HUGE, 1 << 62, 1000])
    def test_absurd_strings(self, tmp_path: Path, length: int) -> None:
        entry = pack_entry("k", STRING, pack_text("v", length))
        self.refuse_entry(tmp_path, entry, "metadata 'k'", ENTRY + 13, f"claims {length} bytes of text")

    def test_a_string_that_is_no_text(self, tmp_path: Path) -> None:
        entry = pack_entry("k", STRING, pack_text(b"ab\xc3"))
        self.refuse_entry(tmp_path, entry, "metadata 'k'", ENTRY + 13, "is not UTF-8 (unexpected end of data in its")

    def test_strings_of_a_list(self, tmp_path: Path) -> None:
        start = ENTRY + 25  # of the first string
        for bad, reason in ((pack_text("b", HUGE), f"claims {HUGE} bytes"), (pack_text(b"\xff"), "is not UTF-8")):
            entry = pack_entry("k", ARRAY, pack_array(STRING, [pack_text("a"), bad]))
            self.refuse_entry(tmp_path, entry, "metadata 'k'", start + 9, reason)

    @pytest.mark.parametrize(
        ("item_type", "what"), [(STRING, "strings"), (ARRAY, "arrays"), (F32, "numbers"), (U8, "numbers")]
    )
    @pytest.mark.parametrize("count", [HUGE, 1 << 61, 1000])
    def test_lying_lists(self, tmp_path: Path, item_type: int, what: str, count: int) -> None:
        entry = pack_entry("k", ARRAY, pack_array(item_type, [], count=count))
        self.refuse_entry(tmp_path, entry, "metadata 'k'", ENTRY + 17, f"claims {count} {what}, more than fit")

    def test_lists_within_lists_without_end(self, tmp_path: Path) -> None:
        nested = pack_array(I32, [])
        for _ in range(5000):
            nested = pack_array(ARRAY, [nested])
        entry = pack_entry("k", ARRAY, nested)
        self.refuse_entry(tmp_path, entry, "metadata 'k'", ENTRY + 13 + 48, "nests arrays deeper than 4")

    def test_lists_of_different_lists(self, tmp_path: Path) -> None:
        items = [pack_array(I32, []), pack_array(F32, [])]
        entry = pack_entry("k", ARRAY, pack_array(ARRAY, items))
        end = ENTRY + len(entry)
        self.refuse_entry(tmp_path, entry, "metadata 'k'", end, "mixes arrays of array[f32] and array[i32]")

    def test_more_strings_than_a_header_may_hold(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(make_gguf([pack_entry("k", ARRAY, pack_array(STRING, [], count=(1 << 22) + 1))]))
        os.truncate(path, 1 << 26)  # sparse: room for that many empty strings
        with pytest.raises(FormatError, match="claims 4194305 strings; a header may hold 4194304"):
            open_gguf(path)

    def test_a_boolean_that_is_none(self, tmp_path: Path) -> None:
        self.refuse_entry(tmp_path, pack_entry("k", BOOL, b"\x02"), "metadata 'k'", ENTRY + 13, "neither 0 nor 1")
        entry = pack_entry("k", ARRAY, pack_array(BOOL, [b"\x01", b"\xff"]))
        self.refuse_entry(tmp_path, entry, "metadata 'k'", ENTRY + 25, "neither 0 nor 1")

    @pytest.mark.parametrize("alignment", [0, 1, 4, 12, 33, (1 << 24) + 1, 1 << 25, 1 << 31])
    def test_absurd_alignments(self, tmp_path: Path, alignment: int) -> None:
        entry = pack_entry("general.alignment", U32, struct.pack("<I", alignment))
        reason = f"is {alignment}; it must be a power of two from 8 to 16777216"
        self.refuse_entry(tmp_path, entry, "metadata 'general.alignment'", ENTRY, reason)

    def test_alignments_that_are_no_numbers(self, tmp_path: Path) -> None:
        for type_id, payload in ((STRING, pack_text("32")), (BOOL, b"\1"), (F32, struct.pack("<f", 32))):
            entry = pack_entry("general.alignment", type_id, payload)
            self.refuse_entry(tmp_path, entry, "metadata 'general.alignment'", ENTRY, "must be a power of two")


class TestTensors:
    def test_names(self, tmp_path: Path) -> None:
        for length in (0, 65536, HUGE):
            info = struct.pack("<Q", length) + ONE_TENSOR[8:]
            reason = f"has {length} bytes; 1 to 65535"
            refuse(tmp_path, make_gguf([], [info], bytes(128)), "tensor name 0", ENTRY, reason)
        info = pack_info(b"\xff\xfe", [32], 0, 0)
        refuse(tmp_path, make_gguf([], [info], bytes(128)), "tensor name 0", ENTRY, "is not UTF-8")

    def test_a_name_twice(self, tmp_path: Path) -> None:
        infos = [ONE_TENSOR, pack_info("t", [32], 0, 128)]
        content = make_gguf([], infos, bytes(256))
        refuse(tmp_path, content, "tensor 't'", ENTRY + len(ONE_TENSOR), "is there twice")

    @pytest.mark.parametrize("count", [0, 5, 0xFFFFFFFF])
    def test_numbers_of_dimensions(self, tmp_path: Path, count: int) -> None:
        info = pack_info("t", [1] * 5, 0, 0, dim_count=count)
        content = make_gguf([], [info], bytes(128))
        reason = f"are {count} in number; 1 to 4 are allowed"
        refuse(tmp_path, content, "dimensions of tensor 't'", ENTRY + 9, reason)

    def test_zero_dimensions(self, tmp_path: Path) -> None:
        content = make_gguf([], [pack_info("t", [32, 0, 7], 0, 0)], bytes(128))
        refuse(tmp_path, content, "dimensions of tensor 't'", ENTRY + 13, "are (7, 0, 32); none may be zero")

    @pytest.mark.parametrize(
        "dims", [[1 << 63], [1 << 32, 1 << 32], [HUGE, HUGE, HUGE, HUGE], [1 << 62, 4], [32, 1 << 59]]
    )
    def test_products_that_overflow(self, tmp_path: Path, dims: list[int]) -> None:
        content = make_gguf([], [pack_info("t", dims, 0, 0)], bytes(128))
        refuse(tmp_path, content, "tensor 't'", ENTRY, "the file ends at")

    def test_unknown_types(self, tmp_path: Path) -> None:
        for type_id in (99, 0xFFFFFFFF):
            content = make_gguf([], [pack_info("t", [32], type_id, 0)], bytes(128))
            reason = f"type number {type_id} is not a ggml type"
            refuse(tmp_path, content, "type of tensor 't'", ENTRY + 21, reason)

    @pytest.mark.parametrize("type_id", UNSUPPORTED_TYPES)
    def test_unsupported_types_are_named(self, tmp_path: Path, type_id: int) -> None:
        content = make_gguf([], [pack_info("t", [256], type_id, 0)], bytes(512))
        reason = f"type {UNSUPPORTED_TYPES[type_id]} is not supported; supported are f32, f16, q4_0"
        refuse(tmp_path, content, "type of tensor 't'", ENTRY + 21, reason)

    def test_columns_that_do_not_fill_blocks(self, tmp_path: Path) -> None:
        content = make_gguf([], [pack_info("t", [320], 12, 0)], bytes(512))
        reason = "q4_k needs rows of a multiple of 256 values, not 320"
        refuse(tmp_path, content, "type of tensor 't'", ENTRY + 21, reason)

    def test_offsets_that_are_not_aligned(self, tmp_path: Path) -> None:
        content = make_gguf([], [pack_info("t", [32], 0, 16)], bytes(512))
        refuse(tmp_path, content, "offset of tensor 't'", ENTRY + 25, "is 16, no multiple of the alignment 32")

    @pytest.mark.parametrize("offset", [32, 1 << 62, HUGE - 31])
    def test_offsets_past_the_end(self, tmp_path: Path, offset: int) -> None:
        content = make_gguf([], [pack_info("t", [32], 0, offset)], bytes(128))
        refuse(tmp_path, content, "tensor 't'", ENTRY, f"the file ends at {len(content)}; is it truncated?")

    def test_tensors_that_overlap(self, tmp_path: Path) -> None:
        infos = [pack_info("a", [32], 0, 64), pack_info("b", [32], 0, 0)]
        content = make_gguf([], infos, bytes(256))
        refuse(tmp_path, content, "tensor 'a'", ENTRY, "overlaps 'b', which ends at 224")
        infos = [pack_info("a", [64], 0, 0), pack_info("b", [8], 0, 64)]
        content = make_gguf([], infos, bytes(256))
        refuse(tmp_path, content, "tensor 'b'", ENTRY + len(infos[0]), "overlaps 'a'")

    def test_no_data_at_all(self, tmp_path: Path) -> None:
        content = make_gguf([], [pack_info("t", [8], 0, 0)])[: ENTRY + 33]
        refuse(tmp_path, content, "tensor 't'", ENTRY, "takes bytes 64 to 96, the file ends at 57")
