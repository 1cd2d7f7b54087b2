"""Command lines run in this process: what they print, the record that --json holds, the sentence of one that is refused."""

import contextlib
import io
import json

from autoshard.cli import main


def run(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


def record_of(*argv: str, code: int = 0) -> dict:
    """What --json prints. AssertionError where the exit code is another."""
    ended, out, err = run(*argv, "--json")
    assert ended == code, err
    return json.loads(out)


def refusal(*argv: str) -> str:
    """The one sentence of a command line that is refused: exit code 2 and nothing on stdout, else AssertionError."""
    code, out, err = run(*argv)
    assert (code, out) == (2, ""), err
    assert err.startswith("autoshard: ") and err.count("\n") == 1 and "Traceback" not in err, err
    return err
