"""The way to another machine is found from real interfaces, in a network namespace of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from injection import holder
from support import environment

from fsdptrain.plan import network
from fsdptrain.plan.network import ephemeral_ports, is_this_machine, local_end, set_gloo_interface, unused_port

FIND = """
import sys, json
from fsdptrain.plan.network import local_end
print(json.dumps([*map(local_end, sys.argv[1:])]))
"""
HOSTS = "127.0.0.1 localhost\n127.0.1.1 here\n10.77.0.2 there\nfd77::2 there6\n"


def test_this_machine_reaches_itself_by_loopback_and_no_unknown_host() -> None:
    assert local_end("127.0.0.1") == local_end("localhost") == ("lo", "127.0.0.1")
    assert local_end("nobody.invalid") is None


def test_an_address_is_that_of_this_machine_whatever_its_own_name_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "nobody.invalid")  # torch's own check raises
    own = local_end("192.0.2.1")
    assert is_this_machine("127.0.0.1") and is_this_machine("localhost")
    assert own is None or is_this_machine(own.address)
    assert not is_this_machine("192.0.2.1") and not is_this_machine("nobody.invalid")


def test_a_port_for_later_is_free_and_none_that_a_connection_gets() -> None:
    ports = {unused_port() for _ in range(20)}
    assert len(ports) > 1 and all(1024 < port < ephemeral_ports()[0] for port in ports)
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_where_the_kernel_gives_all_ports_to_connections_one_of_them_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ephemeral_ports", lambda: (1024, 65535))
    assert unused_port() > 1023


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a network")
def test_the_interface_is_that_of_the_way_to_the_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(HOSTS)
    network = """
        hostname here; mount --bind {} /etc/hosts; ip link set lo up
        ip link add cable type veth peer name far; ip link set cable up; ip link set far up
        ip address add 10.77.0.1/24 dev cable; ip address add fd77::1/64 dev cable nodad
    """.format(tmp_path / "hosts")
    other = """
        ip link add other type veth peer name away; ip link set other up; ip link set away up
        ip address add 10.78.0.1/24 dev other; ip address add 10.78.0.9/24 dev other
    """
    hosts = ["10.77.0.2", "there", "there6", "10.77.0.1", "here", "10.78.0.5"]
    cable = ["cable", "10.77.0.1"]
    try:
        with holder("--mount", "--net", "--uts", script=network) as inside:

            def find() -> list[list[str] | None]:
                words = [*inside.prefix, sys.executable, "-c", FIND, *hosts]
                shown = subprocess.run(words, capture_output=True, text=True, check=True, env=environment()).stdout
                found: list[list[str] | None] = json.loads(shown)
                return found

            assert find() == [cable, cable, ["cable", "fd77::1"], cable, cable, None]
            subprocess.run([*inside.prefix, "sh", "-ec", other], check=True)
            # `here` alone does not say which of two interfaces; a default route does.
            assert find() == [cable, cable, ["cable", "fd77::1"], cable, None, ["other", "10.78.0.1"]]
            route = "ip route add default via 10.78.0.5 src 10.78.0.9"
            subprocess.run([*inside.prefix, "sh", "-ec", route], check=True)
            assert find()[4] == ["other", "10.78.0.9"]
    except PermissionError as error:
        pytest.skip(f"no network namespaces here: {error}")


def test_gloo_uses_the_interface_that_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    set_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7" and not capsys.readouterr().out
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    set_gloo_interface("nobody.invalid")
    assert "GLOO_SOCKET_IFNAME" not in os.environ and not capsys.readouterr().out
    set_gloo_interface("127.0.0.1")
    assert os.environ.pop("GLOO_SOCKET_IFNAME") == "lo"
    assert "gloo listens on lo (127.0.0.1), the way to 127.0.0.1" in capsys.readouterr().out
