"""The parts of protobuf's encoding that all plain readers and writers of Examples share: varints, and lists' tags."""

from __future__ import annotations

from lockstep.features.schema.fields import Field

BytesLike = bytes | bytearray | memoryview

# The tags of Feature's lists. float64 and uint64 values, text and tensors are bytes.
BYTES_LIST, FLOAT_LIST, INT64_LIST = 0x0A, 0x12, 0x1A
VARINT_MAX_BYTES = 10
MASK = (1 << 64) - 1
_LIST_TAGS = {"int64": INT64_LIST, "bool": INT64_LIST, "float32": FLOAT_LIST}
_ONE_BYTE = [bytes([value]) for value in range(128)]


def list_tag(field: Field) -> int:
    """The tag of the list that holds a field's values."""
    return BYTES_LIST if field.is_tensor else _LIST_TAGS.get(field.dtype, BYTES_LIST)


def varint(value: int) -> bytes:
    """A base-128 varint; `value` is not negative."""
    if value < 128:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: BytesLike, at: int) -> tuple[int, int]:
    """A varint that begins at `at` and where it ends; IndexError for one that is cut or longer than it need be.

    The value may have more than 64 bits: who reads numbers looks at that.
    """
    value = data[at]
    if value < 128:
        return value, at + 1
    value &= 127
    for index in range(1, VARINT_MAX_BYTES):
        byte = data[at + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            if byte == 0:
                break
            return value, at + index + 1
    raise IndexError("a varint of more bytes than it takes")


def sized(tag: int, data: bytes) -> bytes:
    """A length-delimited field: its tag of one byte, the length, the data."""
    return bytes((tag,)) + varint(len(data)) + data


def map_key(name: str) -> bytes:
    """What stands in an entry of a map of features before the length of its value: the name, and the value's tag."""
    return sized(0x0A, name.encode()) + b"\x12"
