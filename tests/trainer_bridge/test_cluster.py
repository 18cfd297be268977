"""Which Ray a run uses. No Ray here: what `ray.init` would be asked for is looked at."""

from __future__ import annotations

import socket

import pytest

from trainer_bridge import cluster


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The addresses that `ray.init` was called with."""
    addresses = []
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", lambda address, **_: addresses.append(address))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return addresses


@pytest.fixture
def record(tmp_path):
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def dead():
    """An address at which nothing answers any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"127.0.0.1:{port}"


@pytest.fixture
def alive():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_without_a_cluster_ray_decides(asked):
    assert cluster.connect()
    assert asked == [None]


def test_a_recorded_cluster_is_used_while_it_answers(asked, record, alive):
    record.write_text(alive + "\n")
    assert cluster.connect()
    assert asked == [None]


def test_the_record_of_a_dead_cluster_is_not_waited_for(asked, record, dead, caplog):
    record.write_text(dead)
    assert cluster.connect()
    assert asked == ["local"]
    assert dead in caplog.text and str(record) in caplog.text


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_a_named_cluster_that_is_dead_is_an_error(asked, monkeypatch, dead, form):
    monkeypatch.setenv("RAY_ADDRESS", form.format(dead))
    with pytest.raises(ConnectionError, match=r"nothing answers there.*ray start --head"):
        cluster.connect()
    assert not asked


def test_a_named_cluster_goes_before_the_record(asked, record, monkeypatch, dead, alive):
    record.write_text(dead)
    for named in (alive, "local", "auto"):
        monkeypatch.setenv("RAY_ADDRESS", named)
        assert cluster.connect()
    assert asked == [None] * 3


def test_a_ray_that_does_not_start_names_its_folder(asked, monkeypatch, tmp_path):
    def fail(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cluster.ray, "init", fail)
    with pytest.raises(ConnectionError, match=r"Read-only file system.*RAY_TMPDIR") as raised:
        cluster.connect()
    assert str(tmp_path / "ray") in str(raised.value)


def test_a_ray_that_runs_is_left_running(asked, monkeypatch):
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    assert not cluster.connect()
    assert not asked
