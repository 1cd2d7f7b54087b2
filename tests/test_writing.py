"""`--out` replaces files only: a link stays, a device or a pipe is written into, a folder is refused."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.cli.arguments import check_out
from autoshard.solution.files import clear_folder
from autoshard.writing import is_stream, replacement, write_atomically

EXAMPLE = str(Path(__file__).parent / "data" / "iopddl" / "example.json")


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def copy_of_null(folder: Path) -> Path:
    """A device that behaves like /dev/null, so that a failing test replaces no real one."""
    path = folder / "null"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.stat("/dev/null").st_rdev)
        path.write_bytes(b"")
    except PermissionError:
        pytest.skip("making a device needs root and a folder that may hold devices")
    return path


def test_a_device_is_written_into_and_stays(tmp_path):
    path = copy_of_null(tmp_path)
    write_atomically("content", path)
    assert path.is_char_device() and only(tmp_path) == ["null"]
    assert main(["solve", EXAMPLE, "--out", str(path), "--quiet"]) == 0
    assert path.is_char_device() and only(tmp_path) == ["null"]


def test_the_real_null_device_is_known_as_a_stream_and_taken_by_check_out():
    assert is_stream(Path("/dev/null"))
    check_out("/dev/null")


def test_a_pipe_gets_the_content_and_stays(tmp_path):
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    written = False
    while not written:
        try:
            write_atomically("content", path)
            written = True
        except OSError as error:  # until the reader has opened its end
            assert "is a pipe that nobody reads" in str(error)
    reader.join(timeout=30)
    assert got == [b"content"] and path.is_fifo() and only(tmp_path) == ["pipe.json"]


def test_a_pipe_that_nobody_reads_is_a_sentence_and_no_wait(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a pipe that nobody reads; start its reader first"):
        write_atomically("content", tmp_path / "pipe")


@pytest.mark.parametrize("target_exists", [True, False])
def test_a_link_stays_and_its_target_gets_the_content(tmp_path, target_exists):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "plan.json", tmp_path / "link.json"
    if target_exists:
        target.write_text("old")
    link.symlink_to(Path("there") / "plan.json")
    write_atomically("new", link)
    assert link.is_symlink() and target.read_text() == "new" and not target.is_symlink()
    assert only(tmp_path) == ["link.json", "there"] and only(tmp_path / "there") == ["plan.json"]


def test_a_link_to_a_device_is_written_through(tmp_path):
    device, link = copy_of_null(tmp_path), tmp_path / "link"
    link.symlink_to(device)
    write_atomically("content", link)
    assert link.is_symlink() and device.is_char_device()


def bound_socket(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))  # the name remains when the socket is closed


NOT_WRITTEN = {
    "is a folder": Path.mkdir,
    "is a folder; give the name": lambda path: path.symlink_to(path.parent),
    "is a link to itself": lambda path: path.symlink_to(path),
    "there is no folder": lambda path: path.symlink_to(path.parent / "nowhere" / "x"),
    "is neither a file nor a pipe": bound_socket,
}


@pytest.mark.parametrize("sentence", NOT_WRITTEN)
def test_what_is_no_file_is_refused_before_the_work_and_after_it(tmp_path, monkeypatch, sentence):
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    path = Path("out.json")
    NOT_WRITTEN[sentence](path)
    before = path.lstat()
    with pytest.raises(OSError, match=sentence), replacement(path) as beside:
        beside.write_text("content")
    with pytest.raises(ValueError, match=f"--out .*{sentence}"):
        check_out(str(path))
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode) and only(tmp_path) == ["out.json"]


def test_a_file_that_the_process_has_open_is_written_into(tmp_path):
    script = "from autoshard.writing import write_atomically; print('before', flush=True); write_atomically('content', '/dev/stdout')"
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", script], stdout=log, check=True, cwd=Path(__file__).parent.parent)
    assert (tmp_path / "log").read_text() == "before\ncontent"


def test_a_block_that_raises_leaves_what_there_was(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(KeyError), replacement(tmp_path / "link") as beside:
        beside.write_text("half")
        raise KeyError
    assert (tmp_path / "a").read_text() == "old" and only(tmp_path) == ["a", "link"]


def test_a_checkpoint_replaces_a_folder_only(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file is not a folder; give a folder, or a name that is free"):
        clear_folder(tmp_path / ".file.partial", tmp_path / "file")
    assert only(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"
    (tmp_path / "folder").mkdir()
    clear_folder(tmp_path / ".folder.partial", tmp_path / "folder")
    assert only(tmp_path) == [".folder.partial", "file", "folder"]
