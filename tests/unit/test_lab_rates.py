import pytest

from slipstream.bench.lab import bits_per_s
from slipstream.core.errors import UsageError


@pytest.mark.parametrize(
    ("rate", "bits"), [("1gbit", 10**9), ("500Mbit", 5 * 10**8), ("2.5gbit/s", 25 * 10**8), (" 100kbit ", 10**5)]
)
def test_rates_of_wires(rate: str, bits: int) -> None:
    assert bits_per_s(rate) == bits


@pytest.mark.parametrize("rate", ["", "1", "fast", "1GB/s", "-1gbit", "0gbit", "1bit", "1gbit;reboot"])
def test_what_is_no_rate(rate: str) -> None:
    with pytest.raises(UsageError, match="not the rate of a wire"):
        bits_per_s(rate)
