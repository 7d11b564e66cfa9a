"""Codecs: what comes back, how many bytes it takes, and that rounding at random has the right mean."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.training.compression import kernels
from lockstep.training.compression.codecs import Codec, codec_of
from lockstep.training.compression.method import ALLOWED, NAMES, Compression

CODED = ("bf16", "fp16", "int8", "1bit", "qsgd:1", "qsgd:4", "qsgd:16", "terngrad")
floats = st.floats(-(2.0**100), 2.0**100, width=32)
arrays = hnp.arrays(np.float32, st.integers(0, 3000), elements=floats, fill=st.just(np.float32(0.25)))


def back(codec: Codec, x: np.ndarray, key: int = 1) -> np.ndarray:
    data, out = codec.encode(x, key), np.empty_like(x)
    assert data.dtype == np.uint8 and data.size == codec.size(x.size)
    codec.decode(data, out)
    return out


@pytest.mark.parametrize("method", CODED)
@given(x=arrays)
def test_each_number_comes_back_as_near_as_the_method_promises(method: str, x: np.ndarray) -> None:
    out = back(codec_of(Compression.parse(method)), x)
    assert np.isfinite(out).all()
    blocks = [slice(i, i + 512) for i in range(0, x.size, 512)]
    if method == "bf16":
        assert np.array_equal(out, x.astype(ml_dtypes.bfloat16).astype(np.float32))
    elif method == "fp16":
        most = np.max(np.abs(x), initial=0.0)
        assert np.all(np.abs(out - x) <= np.maximum(np.abs(x) * 2.0**-11, most * 2.0**-39) + 1e-37)
    elif method == "1bit":
        assert np.all((out >= 0) == (x >= 0) | (out == 0))
    else:
        levels = {"int8": 127, "terngrad": 1}.get(method) or int(method.split(":")[1])
        for block in blocks:
            step = np.max(np.abs(x[block]), initial=0.0) / levels * (0.5 if method == "int8" else 1.0)
            assert np.all(np.abs(out[block].astype(np.float64) - x[block]) <= step * (1 + 1e-5) + 1e-30)


@pytest.mark.parametrize("method", CODED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_comes_back_as_such(method: str, bad: float) -> None:
    x = np.ones(4000, np.float32)
    x[1000] = bad
    out = back(codec_of(Compression.parse(method)), x)
    assert not np.isfinite(out[1000]) and np.isfinite(out[3000:]).all() == (method != "fp16")


def test_float16_never_overflows_nor_loses_small_numbers() -> None:
    codec = codec_of(Compression.parse("fp16"))
    for most in (3e38, 65504.0, 1.0, 1e-7, 1e-38, 1e-44):
        x = np.array([most, -most, most / 1000], np.float32)
        np.testing.assert_allclose(back(codec, x), x, rtol=2**-11, atol=1e-40)


@pytest.mark.parametrize("method", ["qsgd:1", "qsgd:4", "qsgd:16", "terngrad"])
def test_rounding_at_random_is_unbiased(method: str) -> None:
    codec, draws = codec_of(Compression.parse(method)), 10_000
    x = np.random.default_rng(3).standard_normal(64).astype(np.float32)
    outs = np.array([back(codec, x, key * 7919 + 13) for key in range(draws)], np.float64)
    error = outs.std(axis=0) / np.sqrt(draws) + 1e-6
    assert np.all(np.abs(outs.mean(axis=0) - x) <= 4.5 * error)
    assert len({out.tobytes() for out in outs[:50]}) > 40, "another key draws other numbers"
    assert np.array_equal(back(codec, x, 5), back(codec, x, 5))


@pytest.mark.parametrize(
    ("method", "least"), [("bf16", 2), ("fp16", 1.999), ("int8", 3.96), ("1bit", 30), ("qsgd:4", 7.8), ("terngrad", 15)]
)
def test_bytes(method: str, least: float) -> None:
    n = 1 << 20
    assert 4 * n / codec_of(Compression.parse(method)).size(n) >= least


@pytest.mark.parametrize(
    ("method", "row"),
    [("int8", "int8"), ("qsgd:127", "qsgd:LEVELS"), ("qsgd:1", "qsgd:LEVELS"), ("terngrad", "terngrad")],
)
def test_the_page_says_how_many_bytes_are_sent(method: str, row: str) -> None:
    """The least and the most of a row, such as 1/3.97 to 1/15.5."""
    page = Path(__file__).parents[3] / "docs" / "compression.md"
    (line,) = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{row}`")]
    told = [float(number) for number in re.findall(r"1/([0-9.]+)", line)]
    n = 1 << 20
    assert (
        round(4 * n / codec_of(Compression.parse(method)).size(n), 2 if method in ("int8", "qsgd:127") else 1) in told
    )


@pytest.mark.parametrize("text", [*CODED, "none", "auto", "topk:1%", "dgc:0.1%", "powersgd:2"])
def test_names(text: str) -> None:
    method = Compression.parse(text)
    assert method.name in NAMES and bool(method) == (text != "none")


@pytest.mark.parametrize(
    "text", ["", "fp8", "bf16:2", "qsgd", "qsgd:0", "qsgd:128", "topk:0%", "topk:1", "dgc:50%", "powersgd:0", "1bit:"]
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="qsgd:LEVELS"):
        Compression.parse(text)
    assert "dgc:0.1%" in ALLOWED


def test_the_kernels_of_float16_are_numpys() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16)) & ((halves & 0x7FFF) < 0x7800)]  # below 2**15
    exact, out = halves.view(np.float16).astype(np.float32), np.empty(halves.size, np.float32)
    kernels.from_float16(halves, np.float32(1), out, out.view(np.uint32))
    assert out.tobytes() == exact.tobytes()
    steps = np.nextafter(exact, np.float32(1e9)) + np.random.default_rng(1).standard_normal(exact.size) * exact * 1e-3
    for x in (exact, steps.astype(np.float32)):
        x = x[np.abs(x) < 2.0**15]
        mine = np.empty(x.size, np.uint16)
        kernels.to_float16(x, np.float32(1), mine)
        assert mine.tobytes() == x.astype(np.float16).tobytes()
