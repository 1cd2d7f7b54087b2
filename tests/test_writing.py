"""`--out` replaces files only: a link stays, a device or a pipe is written into, a folder is refused."""

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.cli.kinds import check_out
from autoshard.solution.files import clear_folder
from autoshard.writing import is_stream, replacement, write_atomically
from tests.helpers_refusals import assert_refused

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
    assert_refused(f"--out .*{sentence}", check_out, str(path))
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


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("mode", [None, 0o600, 0o664, 0o444, 0o755])
def test_a_new_file_has_the_mode_that_the_umask_leaves_and_an_old_one_keeps_its_own(tmp_path, umask, mode):
    path = tmp_path / "plan.json"
    if mode is not None:
        path.write_text("old")
        path.chmod(mode)
    before = os.umask(umask)
    try:
        write_atomically("new", path)
    finally:
        os.umask(before)
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == (0o666 & ~umask if mode is None else mode)


def test_what_replaces_a_private_file_is_never_readable_by_others(tmp_path):
    (tmp_path / "plan.json").write_text("old")
    (tmp_path / "plan.json").chmod(0o600)
    with replacement(tmp_path / "plan.json") as beside:
        assert stat.S_IMODE(beside.stat().st_mode) == 0o600


HELD = """
import sys
from autoshard.writing import replacement
with replacement(sys.argv[1]) as beside:
    beside.write_text("half")
    print(beside, flush=True)
    sys.stdin.read()
"""


def writing_process(path: Path) -> tuple[subprocess.Popen, Path]:
    """A process that is in the middle of writing, and its temporary file."""
    process = subprocess.Popen([sys.executable, "-c", HELD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_write_removes_what_killed_processes_left_and_nothing_else(tmp_path):
    mine = [".autoshard-writing-notes.json", "x.autoshard-writing-1-0.json", ".a.b3x9.json"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    killed, left = writing_process(tmp_path / "a.json")
    alive, held = writing_process(tmp_path / "b.json")
    killed.kill()
    killed.wait()
    assert left.exists() and held.exists()
    write_atomically("content", tmp_path / "c.json")
    assert not left.exists() and held.exists()
    alive.communicate("go on")
    assert (tmp_path / "b.json").read_text() == "half" and only(tmp_path) == sorted([*mine, "b.json", "c.json"])


def test_a_folder_that_may_not_be_listed_is_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda _, how: how != os.R_OK)
    monkeypatch.setattr(os, "listdir", pytest.fail)
    write_atomically("content", tmp_path / "a")
    assert (tmp_path / "a").read_text() == "content"


def test_a_full_disk_is_named_with_the_file_which_stays_as_it_was(tmp_path):
    (tmp_path / "plan.json").write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="plan.json") as caught:
            write_atomically("x" * 5000, tmp_path / "plan.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.strerror == "File too large" and caught.value.filename == str(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == "old" and only(tmp_path) == ["plan.json"]


@pytest.mark.skipif(not is_stream(Path("/dev/full")), reason="there is no /dev/full")
def test_no_space_left_names_the_file(capsys):
    assert main(["solve", EXAMPLE, "--out", "/dev/full", "--quiet"]) == 2
    assert capsys.readouterr().err == "autoshard: /dev/full: No space left on device\n"


def test_an_error_about_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacement(tmp_path / "a"):
        (tmp_path / "other").read_text()
    assert caught.value.filename == str(tmp_path / "other") and only(tmp_path) == []
