"""The exception for errors of the user, which commands print as a single line, and the parts of such lines."""

import contextlib
import difflib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator

QUOTED = 80
"""Largest number of characters that an error line repeats of the user's input."""


class SnipError(Exception):
    """Bad input or an impossible configuration.

    Commands print ``str(error)`` as one line on standard error, without a traceback, and exit with ``exit_code``. The
    message says what is wrong, where, and what to do about it.

    Args:
        message: the text. Runs of white space, line breaks included, become single spaces.
        exit_code: exit code of the command. Default: 2.
    """

    exit_code = 2

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(" ".join(message.split()))
        if exit_code is not None:
            self.exit_code = exit_code


class AgreedError(SnipError):
    """An error that every rank raises, and that rank 0 has printed."""


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn a missing package inside this context into one line that says how to install it.

    Raises SnipError if a package that is imported inside is not installed. ``extra`` is the extra of snip_megatron
    (``setup.py``) that brings the package, ``what`` needs it and is the subject of the sentence.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise SnipError(
            f"{what} needs {missing.name}, which is not installed: pip install 'snip_megatron[{extra}]'"
        ) from missing


@contextlib.contextmanager
def plain_arguments() -> Iterator[None]:
    """Name arguments in errors from inside as the commands have them: ``--pin`` for a training's ``--snip-pin``."""
    try:
        yield
    except SnipError as error:
        raise SnipError(str(error).replace("--snip-", "--"), exit_code=error.exit_code) from None


_ARGUMENT = re.compile(
    r"--snip-(?:settings )?([a-z][a-z_-]*)(?:[ =](?!(?:and|or|is|cannot|has|with)\b)([^\s;]*[^\s;:,]))?"
)


@contextlib.contextmanager
def python_arguments() -> Iterator[None]:
    """Name arguments in errors from inside as a script has them: ``first_update=5`` for ``--snip-first-update 5``."""
    try:
        yield
    except SnipError as error:
        error.args = (_ARGUMENT.sub(_python_argument, str(error)),)  # an AgreedError keeps its class
        raise


def _python_argument(match: re.Match[str]) -> str:
    name, value = match[1].replace("-", "_"), match[2] or ""
    return f"{name}={value if not value or is_number(value) or value == 'None' else repr(value)}"


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Begin the message of an error from inside with ``where`` and a colon."""
    try:
        yield
    except SnipError as error:
        raise SnipError(f"{where}: {error}") from None


def cut(text: object) -> str:
    """Return ``text`` if it has at most :data:`QUOTED` characters, otherwise its beginning and ``...``. For names in
    error lines.
    """
    whole = str(text)
    return whole if len(whole) <= QUOTED else whole[: QUOTED - 3] + "..."


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` for the known name that is closest to ``word``. Empty if none is close."""

    def without_prefix(name: str) -> str:  # the prefix would make all of them alike
        return name.removeprefix("--snip-").lstrip("-")

    names = {without_prefix(name): name for name in candidates}
    closest = difflib.get_close_matches(without_prefix(word), list(names), n=1, cutoff=0.7)
    return f"; did you mean {names[closest[0]]}?" if closest else ""


def with_suggestion(message: str, candidates: Iterable[str]) -> str:
    """Return argparse's message about an unknown argument or choice, with the known name that is closest to it."""
    word = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s=']+)", message)
    return message if word is None else message + did_you_mean(word[1], candidates)


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message that is not empty, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def quoted(value: object) -> str:
    """Return ``repr(value)``, shortened as :func:`cut` does. For values in error lines."""
    return cut(repr(value))


def is_number(text: str) -> bool:
    """Whether a word of a command line is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
