"""The program `autoshard`: its verbs, how it reports failures, and its exit codes.

Exit codes: 0 ok; 1 the answer is no (infeasible, mismatch); 2 bad input, with one sentence on stderr; 130 interrupted.
"""

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from autoshard.cli.combinations import is_launch
from autoshard.cli.output import Output, VisibleLines, complain, say
from autoshard.cli.verbs import Verbs
from autoshard.version import VERSION

Words = list[str]


def _page(words: Words) -> Words:
    """The model was an argument, and the page's file had a default."""
    now = ["show"]
    for k, word in enumerate(words):
        is_model = (".py:" in word or word.startswith("hf:")) and not word.startswith("-") and words[k - 1 : k] != ["--set"]
        now += ["--model"] if is_model else []
        now.append(re.sub("^--out(?=$|=)", "--html", word))
    return now if any(word.startswith("--html") for word in now) else [*now, "--html", "report.html"]


# verb: a command line as it was written, as it is written now, and the function that makes the new words of those after the verb
OLD_VERBS: dict[str, tuple[str, str, Callable[[Words], Words]]] = {
    "programs": (
        "programs TARGET",
        "plan FILE.py:FUNCTION, or show PLAN",
        lambda words: ["plan" if any(".py:" in word for word in words) else "show", *words],
    ),
    "report": ("report PLAN MODEL --out PAGE.html", "show PLAN --html PAGE.html --model MODEL", _page),
    "show-prices": ("show-prices", "calibrate show", lambda words: ["calibrate", "show", *words]),
    "diff": ("diff A B", "show A B", lambda words: ["show", *words]),
    "simulate": ("simulate CONFIGURATION", "show CONFIGURATION", lambda words: ["show", *words]),  # of a launcher
}


def rewritten(argv: Sequence[str]) -> Words:
    """The same command line with a verb of today."""
    words = list(argv)
    place = next((k for k, word in enumerate(words) if word[:1] != "-" and words[k - 1 : k] != ["--log-level"]), None)
    if place is None or words[place] not in OLD_VERBS:
        return words
    if words[place] == "simulate" and not is_launch((words[place + 1 :] or [""])[0], "" if "--launcher" in words else None):
        return words
    before, now, rewrite = OLD_VERBS[words[place]]
    complain(f"autoshard: `{before}` is now `{now}`")
    return [*words[:place], *rewrite(words[place + 1 :])]


# -- verbs of earlier versions ------------------------------------------------------------------------------------------------------


OK, NO, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
LONG_WORD, LONG_SENTENCE = 300, 2000  # letters; what is longer is shortened
# package: the extra that installs it
EXTRAS = {
    "numba": "fast", "scipy": "calibrate", "matplotlib": "plots", "jinja2": "plots", "transformers": "hf", "accelerate": "hf",
}  # fmt: skip
# what all errors of a command line are: TyperException, until typer 0.27 ClickException
USAGE: type[Exception] = typer.BadParameter.__mro__[-4]
NO_WORDS: tuple[list[str], ...] = ([], ["calibrate"])  # a command line that names no verb asks which there are


app = Verbs(
    help="Plan, with a proof, how to shard the tensors of a PyTorch model over a mesh of devices, and check the plan.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        say(f"autoshard {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    traceback: bool = typer.Option(False, "--traceback", help="Show where in the code a failure came from."),
    log_level: str | None = typer.Option(None, help="Log on stderr too: debug, info, warning or error.", show_default=False),
) -> None:
    levels = ("debug", "info", "warning", "error")
    if log_level is not None and log_level.lower() not in levels:
        raise ValueError(f"--log-level is {log_level}; expected {', '.join(levels)}")
    if log_level is not None:
        handler = logging.StreamHandler()
        handler.setFormatter(VisibleLines("%(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=log_level.upper(), handlers=[handler])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    arguments = rewritten(sys.argv[1:] if argv is None else argv)
    if arguments in NO_WORDS:
        arguments = [*arguments, "--help"]
    try:
        code = app(args=arguments, prog_name="autoshard", standalone_mode=False)
    except USAGE as error:  # arguments that are no command line
        return _refuse(_usage_sentence(error))
    except (typer.Abort, KeyboardInterrupt):
        return _refuse("interrupted", INTERRUPTED)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if (extra := EXTRAS.get(package)) is None:
            raise
        return _refuse(f"{package} is not installed; run: pip install 'autoshard[{extra}]'")
    except (ValueError, OSError) as error:
        if arguments[:1] == ["--traceback"]:
            raise
        return _refuse(_sentence(error))
    return code if isinstance(code, int) else OK


def say_no(output: Output, error: ValueError, record: Mapping[str, Any] | None = None) -> int:
    """Answer with an `Infeasible`: its sentence on stderr, and with --json an object that also holds `record`. Returns the exit code."""
    output.progress_shown.stop()
    complain(f"autoshard: {error}")
    if output.as_json:
        output.answer({"status": "infeasible", "message": str(error), **(record or {})}, str)
    return NO


def _refuse(sentence: str, code: int = BAD_INPUT) -> int:
    complain(f"autoshard: {sentence}")
    return code


def _sentence(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return _shortened(" ".join(str(error).split())) or type(error).__name__


def _shortened(sentence: str) -> str:
    """The sentence with long words, and then itself, shortened to their ends: a file may hold a name of a million letters."""
    for length, parts in ((LONG_WORD, re.findall(rf"\S{{{LONG_WORD + 1},}}", sentence)), (LONG_SENTENCE, [sentence])):
        for part in parts:
            if len(part) > length:
                sentence = sentence.replace(part, f"{part[: length // 2]} ... {part[-length // 4 :]}")
    return sentence


def _usage_sentence(error: Exception) -> str:
    message = " ".join(error.format_message().split()).rstrip(".") if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "autoshard"
    return f"{message}; see {where} --help" if message else f"see {where} --help"
