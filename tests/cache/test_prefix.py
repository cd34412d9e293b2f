"""Names of pages: equal for equal tokens alone, and the index that finds them."""

from __future__ import annotations

import hashlib
import struct

import pytest

from mlxr.cache.prefix import KEY_BYTES, PageKeys, PrefixIndex, hash_fields


def chain_of(tokens: list[int], page_size: int = 2, root: bytes = b"root") -> list[bytes]:
    keys = PageKeys(root, page_size)
    keys.cover(tokens, len(tokens) // page_size)
    return keys.chain


def test_key_is_the_documented_hash() -> None:
    first, second = chain_of([1, -2, 3, 2**31 - 1, 5])[1:]
    assert first == hashlib.blake2b(b"root" + struct.pack("<2i", 1, -2), digest_size=32).digest()
    assert second == hashlib.blake2b(first + struct.pack("<2i", 3, 2**31 - 1), digest_size=32).digest()


def test_key_depends_on_everything_before_it() -> None:
    assert chain_of([1, 2, 3, 4])[2] != chain_of([9, 2, 3, 4])[2]
    assert chain_of([1, 2, 3, 4])[2] != chain_of([2, 1, 3, 4])[2]
    assert chain_of([1, 2, 3, 4])[1:] != chain_of([1, 2, 3, 4], root=b"other")[1:]
    assert chain_of([1, 2, 3, 4])[1] == chain_of([1, 2, 7, 8])[1]


def test_chain_grows_by_parts() -> None:
    tokens, keys = list(range(11)), PageKeys(b"root", 2)
    for full_pages in (0, 2, 2, 5, 3):
        assert keys.cover(tokens, full_pages) == chain_of(tokens)[1 : full_pages + 1]
    assert keys.chain == chain_of(tokens)


def test_forked_keys_go_their_own_way() -> None:
    keys = PageKeys(b"root", 2)
    keys.cover([1, 2, 3, 4, 5, 6], 3)
    twin = keys.fork(2)
    assert twin.cover([1, 2, 3, 4, 7, 8], 3) == chain_of([1, 2, 3, 4, 7, 8])[1:]
    assert keys.chain == chain_of([1, 2, 3, 4, 5, 6])


def test_fields_cannot_run_into_each_other() -> None:
    assert len(hash_fields(b"")) == KEY_BYTES
    assert len({hash_fields(b"ab", b"c"), hash_fields(b"a", b"bc"), hash_fields(b"abc"), hash_fields(b"abc", b"")}) == 4


def test_pages_are_found_by_their_keys() -> None:
    index, chain = PrefixIndex(), chain_of(list(range(8)))
    for page, place in ((5, 0), (3, 1), (9, 2)):
        index.add(chain[place + 1], chain[place], page, place)
    found = [index.get(key) for key in chain[1:4]]
    assert [entry.page for entry in found if entry is not None] == [5, 3, 9]
    assert [entry.depth for entry in found if entry is not None] == [0, 1, 2]
    assert index.get(chain[4]) is index.get(chain[0]) is None
    index.check()


def test_pages_that_stand_for_themselves_need_none_before_them() -> None:
    index, chain = PrefixIndex(linked=False), chain_of([1, 2, 3, 4, 5, 6])
    first, last = index.add(chain[1], chain[0], 0, 0), index.add(chain[3], chain[2], 1, 2)
    index.check()
    index.remove(first)
    index.check()
    assert (last.depth, last.parent, first.children) == (2, None, 0)


def test_only_leaves_can_be_forgotten() -> None:
    index, chain = PrefixIndex(), chain_of([1, 2, 3, 4])
    root = index.add(chain[1], chain[0], 0, 0)
    leaf = index.add(chain[2], chain[1], 1, 1)
    with pytest.raises(ValueError, match="page 0 is before 1 other pages"):
        index.remove(root)
    index.remove(leaf)
    index.remove(root)
    index.check()
    assert len(index) == 0
    assert index.at(0) is None


def test_a_page_has_one_name_and_a_name_one_page() -> None:
    index, chain = PrefixIndex(), chain_of([1, 2, 3, 4])
    index.add(chain[1], chain[0], 0, 0)
    with pytest.raises(ValueError, match="indexed already"):
        index.add(chain[1], chain[0], 1, 0)
    with pytest.raises(ValueError, match="indexed already"):
        index.add(chain[2], chain[1], 0, 1)


@pytest.mark.parametrize("field", ["children", "depth", "page", "last_used"])
def test_check_notices_every_wrong_field(field: str) -> None:
    index, chain = PrefixIndex(), chain_of([1, 2, 3, 4])
    index.add(chain[1], chain[0], 0, 0)
    entry = index.add(chain[2], chain[1], 1, 1)
    index.check()
    setattr(entry, field, getattr(entry, field) + 7)
    with pytest.raises(AssertionError, match="page"):
        index.check()
