"""How launched ranks find the place where they meet."""

from __future__ import annotations

import socket

import pytest

from cs336_systems.distributed.meeting import _wait_until_known


def test_a_host_that_becomes_known_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [OSError(-2, "Name or service not known")] * 2

    def look_up(host: str, port: None) -> list[object]:
        assert (host, port) == ("node-0", None)
        if answers:
            raise answers.pop()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    _wait_until_known("node-0", timeout_s=60.0)
    assert answers == []
    told = (
        "MASTER_ADDR='node-0' in the environment is no host known here (Name or service not known); trying for 60 s.\n"
    )
    assert capsys.readouterr().err == told


def test_a_host_that_nobody_knows_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: None) -> list[object]:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(TimeoutError, match="MASTER_ADDR='node-1' in the environment is no host known here"):
        _wait_until_known("node-1", timeout_s=0.1)


def test_what_can_be_no_name_of_a_host_is_told_as_one_that_nobody_knows() -> None:
    with pytest.raises(TimeoutError, match=r"MASTER_ADDR='a\.\.b' in the environment is no host known here"):
        _wait_until_known("a..b", timeout_s=0.1)
