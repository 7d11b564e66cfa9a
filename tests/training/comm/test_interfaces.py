"""Which address a rank tells the others, and which network may be trusted."""

from __future__ import annotations

import socket

import pytest

from lockstep.storage.errors import ConfigError
from lockstep.training.comm.hosts import local_addresses, require_trust, route_address, trusted_address
from lockstep.training.launch.barrier import check_spark_encrypts, control_hosts

HERE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.1.0.5", "fd00::5"], "ib0": ["10.2.0.5"], "v6": ["fd01::5"]}


@pytest.mark.parametrize(
    ("trust", "address"),
    [
        ("eth0", "10.1.0.5"),  # IPv4 first
        ("v6", "fd01::5"),
        ("10.2.0.0/16", "10.2.0.5"),
        ("fd00::/64", "fd00::5"),  # the same interface's other address
        ("0.0.0.0/0", "10.1.0.5"),  # no other host reaches loopback
        ("127.0.0.0/8", "127.0.0.1"),  # unless that is what is asked for
    ],
)
def test_a_network_by_name_or_by_number(trust: str, address: str) -> None:
    assert trusted_address(trust, HERE) == address


@pytest.mark.parametrize("trust", ["eth1", "10.3.0.0/16", "10.1.0.5/16", "10.1.0.0/40", "10.1.0.5", ""])
def test_what_is_not_there_is_refused_with_a_list_of_what_is(trust: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trusted_address(trust, HERE)
    assert caught.value.exit_code == 2
    assert f"--trust-network {trust}" in caught.value.what
    assert caught.value.allowed == "one of eth0 (10.1.0.5, fd00::5), ib0 (10.2.0.5), lo (127.0.0.1, ::1), v6 (fd01::5)"


def test_nothing_unauthenticated_without_a_trusted_network() -> None:
    with pytest.raises(ConfigError, match="nccl backend does not authenticate its peers") as caught:
        require_trust(None, "nccl")
    assert "--trust-network IFACE" in caught.value.next_step and "lo (127.0.0.1" in caught.value.next_step
    assert require_trust("127.0.0.0/8", "nccl") == "127.0.0.1"


def test_the_way_to_the_driver_gives_the_address() -> None:
    assert route_address(("127.0.0.1", 9)) == "127.0.0.1"  # a driver on this host alone: no other host sees the rank
    assert route_address(("localhost", 9)) in ("127.0.0.1", "::1")


def test_the_addresses_of_this_host_can_be_listened_on() -> None:
    found = local_addresses()
    assert "127.0.0.1" in [address for addresses in found.values() for address in addresses]
    for addresses in found.values():
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            socket.create_server((address, 0), family=family).close()


@pytest.mark.parametrize(
    ("master", "settings", "bind", "host"),
    [
        ("local[2]", {"spark.driver.host": "10.1.0.5"}, "127.0.0.1", "127.0.0.1"),  # nobody else needs to reach it
        ("local-cluster[2,1,1024]", {"spark.driver.host": "10.1.0.5"}, "127.0.0.1", "127.0.0.1"),
        ("yarn", {"spark.driver.host": "node-1"}, "0.0.0.0", "node-1"),
        ("k8s://x", {"spark.driver.host": "svc", "spark.driver.bindAddress": "10.8.0.3"}, "10.8.0.3", "svc"),
    ],
)
def test_where_the_driver_listens(master: str, settings: dict[str, str], bind: str, host: str) -> None:
    assert control_hosts(master, settings) == (bind, host)


@pytest.mark.parametrize(
    ("master", "settings", "right"),
    [
        ("local[2]", {}, True),
        ("yarn", {}, False),
        ("yarn", {"spark.authenticate": "true"}, False),  # proves who speaks, hides nothing
        ("yarn", {"spark.network.crypto.enabled": "true"}, False),  # hides it from others, and proves nothing
        ("k8s://x", {"spark.ssl.rpc.enabled": "TRUE"}, False),
        ("yarn", {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}, True),
        ("k8s://x", {"spark.authenticate": "true", "spark.ssl.rpc.enabled": "TRUE"}, True),
    ],
)
def test_tls_rests_on_what_spark_keeps_secret(master: str, settings: dict[str, str], right: bool) -> None:
    if right:
        check_spark_encrypts(master, settings)
        return
    with pytest.raises(ConfigError, match="protects nothing") as caught:
        check_spark_encrypts(master, settings)
    assert "spark.network.crypto.enabled=true" in caught.value.next_step
    assert "spark.authenticate=" in caught.value.got and "spark.authenticate=true with" in caught.value.allowed
