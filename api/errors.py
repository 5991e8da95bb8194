"""The table of errors: its root, its rows, and the status codes of errors.

An error is a class only if our code catches it separately. Every other error is a row, defined with
:meth:`NvshimError.row` of a branch of this tree, and raised like a class::

    NvshimError
    ├── TtrpcError             api.ttrpc.errors  E00xx  the wire
    ├── InventoryError         hooks.errors      E01xx  driver, GPUs, NVML
    ├── RequestError           hooks.errors      E02xx  what the container asked for
    ├── RootfsError            hooks.errors      E03xx  the image's files
    ├── SpecError              hooks.errors      E04xx  config.json, plan, verification
    ├── ConfigError            hooks.errors      E05xx  our own configuration
    ├── CdiError               hooks.errors      E06xx  CDI specs of any vendor
    ├── ShimError              shim.errors       E1xxx  bundle, runtime, tasks, stdio
    └── IntegrationError       integration.errors  E2xxx  simulated node, demo, private containerd

Each has a stable ``code``, a ``slug``, the gRPC ``status`` that it maps to, a ``remedy`` for
raisers that name none, and a message of one line that says what was requested, what was found and
what to do. The ttrpc status carries that line, so ``ctr``, ``kubectl describe`` and containerd's
log show it. docs/reference/errors.md and ``nvshim explain CODE`` are generated from rows and
classes.

A status is a number, not an enum's member, because a peer may send any number.
"""

from __future__ import annotations

from typing import ClassVar, Final, Generic, Self, TypeVar

from api.values import dataclass


class Status:
    """The gRPC status codes, with which containerd distinguishes failures.

    Source: google.rpc.Code; containerd maps them in its package errdefs.
    """

    OK: Final = 0
    CANCELLED: Final = 1
    UNKNOWN: Final = 2
    INVALID_ARGUMENT: Final = 3
    DEADLINE_EXCEEDED: Final = 4
    NOT_FOUND: Final = 5
    ALREADY_EXISTS: Final = 6
    PERMISSION_DENIED: Final = 7
    RESOURCE_EXHAUSTED: Final = 8
    FAILED_PRECONDITION: Final = 9
    ABORTED: Final = 10
    OUT_OF_RANGE: Final = 11
    UNIMPLEMENTED: Final = 12
    INTERNAL: Final = 13
    UNAVAILABLE: Final = 14
    DATA_LOSS: Final = 15
    UNAUTHENTICATED: Final = 16


class NvshimError(Exception):
    """The root of all errors that this project raises on purpose.

    A class of errors declares what it adds to its branch: ``class X(ShimError, code="NVSHIM-E1999",
    status=Status.NOT_FOUND, remedy="wait")``. A class without a code is only a branch.

    Args:
        asked: what the caller wanted, in its words ("to read /etc/x", "GPU 7").
        found: the obstacle ("it is not valid TOML"); if it starts with a verb, it continues
            ``asked`` ("does not exist; this node has 0 and 1").
        do: what the reader can do about it; by default the remedy of the class or row.

    ``str()`` returns one line that reads as sentences: ``CODE name: cannot read /etc/x: it is not
    valid TOML. Correct line 3``. It has no full stop, because containerd 1 appends its own words.

    Attributes:
        slug: its readable name (driver-not-found).
        preface: words before the code, for programs that search for them.
    """

    code: str = "NVSHIM-E0000"
    slug: str = "nvshim-error"
    status: int = Status.UNKNOWN
    remedy: ClassVar[str] = ""
    """The remedy if the raising code has no better one."""
    preface: str = ""

    def __init_subclass__(
        cls, *, code: str = "", status: int | None = None, remedy: str = ""
    ) -> None:
        super().__init_subclass__()
        letters = [("-" + c.lower()) if c.isupper() else c for c in cls.__name__]
        cls.slug = "".join(letters).lstrip("-")
        if code:
            cls.code = code
        if status is not None:
            cls.status = status
        if remedy:
            cls.remedy = remedy

    def __init__(self, asked: str, *, found: str, do: str = "") -> None:
        self.asked = one_line(asked)
        self.found = one_line(found)
        self.do = one_line(do or self.remedy)
        super().__init__(self.asked, self.found, self.do)

    @classmethod
    def row(cls, name: str, status: int, when: str, *, remedy: str = "") -> ErrorRow[Self]:
        """Define an error of this branch without its own class.

        Args:
            name: its code and slug ("NVSHIM-E2705 device-gone"), which start its message.
            status: one of :class:`Status`.
            when: when it is raised, as sentences for the reference.
            remedy: the remedy, as for a class.
        """
        code, _, slug = name.partition(" ")
        return ErrorRow(cls, code, slug, status, when, remedy)

    @property
    def sentence(self) -> str:
        """The message: what failed and why, then what to do."""
        asked, found = self.asked, self.found.rstrip(".")
        if asked.startswith("to "):
            said = f"cannot {asked[3:]}: {found}"
        else:
            said = f"{asked}{' ' if found.startswith(_VERBS) else ': '}{found}"
        first, _, rest = self.do.partition(" ")
        if first.rstrip(":,;").isalpha():
            first = first[0].upper() + first[1:]
        return f"{said}. {first} {rest}".rstrip(" .") if self.do else said

    def __str__(self) -> str:
        return f"{self.preface}{self.code} {self.slug}: {self.sentence}"


_E_co = TypeVar("_E_co", bound=NvshimError, covariant=True)


@dataclass(frozen=True, slots=True)
class ErrorRow(Generic[_E_co]):
    """An error without its own class, with the fields of :meth:`NvshimError.row`."""

    branch: type[_E_co]
    code: str
    slug: str
    status: int
    when: str
    remedy: str

    def __call__(self, asked: str, *, found: str, do: str = "") -> _E_co:
        """Create an error of the branch, with the row's code, slug and status."""
        error = self.branch(asked, found=found, do=do or self.remedy)
        error.code, error.slug, error.status = self.code, self.slug, self.status
        return error


_VERBS = ("is ", "are ", "has ", "have ", "does ", "do ", "was ", "were ", "cannot ")

# A message may quote an image's file or a program's output, which must not break the line, colour a
# terminal or fill a log.
_LONGEST_PART = 600


def one_line(text: str) -> str:
    """Return ``text`` without line breaks and control characters, cut to a limited length.

    Args:
        text: any text, including one that an image or a foreign program wrote.

    Returns:
        Printable text of at most 600 characters, without a line break.
    """
    words = " ".join(text.split())
    printable = words
    if not words.isprintable():
        printable = "".join(c if c.isprintable() else "?" for c in words)
    return printable if len(printable) <= _LONGEST_PART else printable[: _LONGEST_PART - 1] + "…"


def type_name(error: BaseException) -> str:
    """Return the name of an error's class, or of its row."""
    if isinstance(error, NvshimError):
        return "".join(word.capitalize() for word in error.slug.split("-"))
    return type(error).__name__


# The depth of an error's causes, and of groups around it.
_DEEPEST_CAUSE = 8


def describe_bug(error: BaseException, *, depth: int = _DEEPEST_CAUSE) -> str:
    """Describe an unexpected exception and where it happened, for the person who fixes the bug.

    The module traceback would read files: its own, and those of the lines that it shows. A shim may
    outlive its installation, and so these files.

    Args:
        error: the exception.
        depth: how many levels of causes and grouped exceptions to include.

    Returns:
        In one line: its type and text, the calls that led to it, outermost first, and the same for
        its cause and for the exceptions in a group.
    """
    text = one_line(f"{type_name(error)}: {error}")
    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    if places:
        text += f" (at {', '.join(places)})"
    if depth > 0:
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        for each in inner[:depth]:
            text += f"; in it {describe_bug(each, depth=depth - 1)}"
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is not None:
            text += f"; because of {describe_bug(before, depth=depth - 1)}"
    return text


_KINDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a string",
    list: "a list", dict: "an object",
}  # fmt: skip


def kind_name(kind: type) -> str:
    """Return the common name of a type of JSON or TOML values ("a string").

    Args:
        kind: the type.
    """
    return _KINDS.get(kind, "another kind of value")


def printable(text: str) -> str:
    """Escape all characters in ``text`` that would break a line or move a cursor.

    Args:
        text: any text, including content of an image or a pod.

    Returns:
        One line of printable text, of any length, from which the original can be recognised.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
