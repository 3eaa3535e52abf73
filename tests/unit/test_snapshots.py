"""Tests of exported models of a running run: they appear whole or not at all, in a folder and in a bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.transport.archive.publishing import Snapshots, due
from tests.s3_double import S3Double, s3_double

RUN = b"\x01" * 32


@pytest.fixture
def bucket() -> Iterator[S3Double]:
    with s3_double() as server:
        yield server


def model(folder: Path) -> None:
    for name in ("config.json", "README.md", "model.safetensors"):
        (folder / name).write_text(f"{name} of a model")


def cut(folder: Path) -> None:
    """Interrupt an export, as a kill or a newer export does."""
    model(folder)
    raise FileNotFoundError("a stage's state")


@pytest.mark.parametrize(
    ("published", "newest", "finished", "wanted"),
    [
        (set(), 0, False, False),
        (set(), 4, False, False),
        (set(), 5, False, True),
        ({5}, 9, False, False),
        ({5}, 10, False, True),
        ({5, 12}, 16, False, False),
        ({5}, 6, True, True),
        ({6}, 6, True, False),
        ({6}, 0, True, False),
    ],
)
def test_what_is_due(published: set[int], newest: int, finished: bool, wanted: bool):
    assert due(published, newest, 5, finished) == wanted


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path):
    place = Snapshots(str(tmp_path / "models"), RUN)
    seen: list[set[str]] = []

    def slowly(folder: Path) -> None:
        model(folder)
        seen.append({path.name for path in (tmp_path / "models").glob("round-*")})

    place.publish(5, slowly)
    assert seen == [set()], "nothing under its name before it is whole"
    with pytest.raises(FileNotFoundError):
        place.publish(10, cut)
    assert place.published() == {5}
    assert Snapshots(str(tmp_path / "models"), RUN).published() == {5}
    place.publish(10, model)
    assert place.published() == {5, 10}
    names = {path.relative_to(tmp_path / "models").as_posix() for path in (tmp_path / "models").rglob("*") if path.is_file()}
    files = ("config.json", "README.md", "model.safetensors")
    assert names == {"run.json", *(f"round-{number:06d}/{name}" for number in (5, 10) for name in files)}


def test_a_bucket_gets_what_makes_a_model_of_it_last(bucket: S3Double):
    place, order = Snapshots("s3://bucket/models", RUN), []

    class Watched(dict[str, bytes]):
        def __setitem__(self, key: str, value: bytes) -> None:
            order.append(key)
            super().__setitem__(key, value)

    bucket.objects = Watched(bucket.objects)
    place.publish(5, model)
    assert order[-1] == "models/round-000005/config.json"
    assert place.published() == {5}
    with pytest.raises(FileNotFoundError):
        place.publish(10, cut)
    assert not any("round-000010" in name for name in bucket.objects)
    del bucket.objects["models/round-000005/config.json"]  # killed before it was sent
    again = Snapshots("s3://bucket/models", RUN)
    assert again.published() == set()
    again.publish(5, model)
    assert again.published() == {5}
    assert bucket.objects["models/round-000005/model.safetensors"] == b"model.safetensors of a model"


def test_a_place_is_one_run_s(tmp_path: Path, bucket: S3Double):
    for url in (str(tmp_path / "models"), "s3://bucket/models"):
        Snapshots(url, RUN)
        Snapshots(url, RUN)
        with pytest.raises(ConfigError, match="models of another run"):
            Snapshots(url, b"\x02" * 32)


def test_a_place_that_cannot_be_used_is_a_sentence(tmp_path: Path, bucket: S3Double):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^DIR .*file is a file"):
        Snapshots(str(tmp_path / "file" / "models"), RUN)
    with pytest.raises(ConfigError, match=r"^DIR ftp://x .*: use a folder"):
        Snapshots("ftp://x", RUN)
    place = Snapshots("s3://bucket/models", RUN)
    bucket.down = True
    with pytest.raises(LocalError, match="s3://bucket/models"):
        place.published()
