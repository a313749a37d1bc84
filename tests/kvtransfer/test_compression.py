"""When compressing pays: decided from the measured link, ratio and compressor, on numbers alone."""

import pytest

from pdserve.kvtransfer.compression import CompressionPolicy, LinkMeter, pays
from pdserve.kvtransfer.encoding import Encoding, compress, decompress

MIB = 2**20


@pytest.mark.parametrize(
    ("link", "compressor", "ratio", "does_pay"),
    [
        (10e6, 400e6, 0.7, True),  # a slow link
        (1e9, 400e6, 0.3, False),  # the compressor is slower than the link
        (10e6, 400e6, 0.95, False),  # hardly smaller
        (100e6, 400e6, 0.7, False),  # 0.25 + 0.7: not worth it
        (100e6, 800e6, 0.7, True),  # 0.125 + 0.7
    ],
)
def test_it_pays_when_a_byte_is_over_sooner(link, compressor, ratio, does_pay):
    assert pays(link, compressor, ratio) is does_pay


def test_the_meter_counts_only_the_time_in_which_something_is_under_way():
    meter = LinkMeter()
    now = 0.0
    for _ in range(4):
        meter.sent(MIB, MIB // 2, now)
        meter.returned(MIB, now + 0.1)
        now += 10.0  # idle

    assert meter.bytes_per_s == pytest.approx(MIB / 2 / 0.1)


def test_the_meter_knows_nothing_before_a_mebibyte():
    meter = LinkMeter()
    meter.sent(MIB, MIB - 1, 0.0)
    meter.returned(MIB, 0.1)

    assert meter.bytes_per_s is None


def _policy(bytes_per_s, compression="auto", encodings=("raw", "zstd")):
    policy = CompressionPolicy(compression, encodings)
    policy.meter.sent(4 * MIB, 4 * MIB, 0.0)
    policy.meter.returned(4 * MIB, 4 * MIB / bytes_per_s)
    return policy


def test_a_slow_link_is_tried_and_kept_when_it_pays():
    policy = _policy(5e6)

    assert policy.choose(4) is Encoding.ZSTD
    policy.compressed(MIB, MIB // 2, 0.003)
    assert policy.choose(4) is Encoding.ZSTD


def test_what_does_not_pay_is_tried_again_only_once_in_a_while():
    policy = _policy(5e6)
    policy.choose(4)
    policy.compressed(MIB, MIB - 10, 0.003)

    chosen = [policy.choose(4) for _ in range(65)]

    assert chosen == [Encoding.RAW] * 64 + [Encoding.ZSTD]


@pytest.mark.parametrize(
    ("bytes_per_s", "compression", "encodings", "chosen"),
    [
        (2e9, "auto", ("raw", "zstd"), Encoding.RAW),  # a fast link is not even tried
        (1e6, "none", ("raw", "zstd"), Encoding.RAW),
        (2e9, "zstd", ("raw", "zstd"), Encoding.ZSTD),
        (1e6, "zstd", ("raw",), Encoding.RAW),  # the peer cannot read it
    ],
)
def test_choice(bytes_per_s, compression, encodings, chosen):
    assert _policy(bytes_per_s, compression, encodings).choose(1) is chosen


def test_nothing_is_compressed_before_the_link_is_known():
    assert CompressionPolicy("auto", ("raw", "zstd")).choose(1) is Encoding.RAW


def test_a_block_comes_back_and_one_that_lies_about_its_size_does_not():
    block = memoryview(bytes(1000) + bytes(range(256)))
    payload = compress(block)

    assert payload.nbytes < block.nbytes
    assert decompress(payload, block.nbytes) == block
    for wrong in (payload[:-3], memoryview(b"garbage"), memoryview(b"")):
        with pytest.raises(ValueError, match=r"zstd|does not hold"):
            decompress(wrong, block.nbytes)
    with pytest.raises(ValueError, match="does not hold 1255 bytes"):
        decompress(payload, 1255)
