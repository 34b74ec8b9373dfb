"""Names that a pod may give to a file, and what is wrong with each."""

from dataclasses import dataclass

REFUSED = (9, 10)
#: Brought as it is, or refused: both are right where the name is only unusual.
EITHER = (0, 9, 10)


@dataclass(frozen=True)
class Name:
    """A name that stands in a pod's list of files.

    Attributes:
        id: Name of the case.
        lie: The bytes; `<HOME>` and `<BASE>` are the laptop's home and what lies above it.
        why: What is wrong with it.
        codes: Exit codes of a pull that are right.
    """

    id: str
    lie: bytes
    why: str
    codes: tuple[int, ...] = REFUSED


NAMES = (
    Name("absolute", b"<HOME>/.bashrc", "an absolute path names a start-up file"),
    Name("absolute-new", b"<HOME>/.ssh/rc", "an absolute path makes a file that did not exist"),
    Name("absolute-twice", b"//<HOME>/.bashrc", "POSIX gives two slashes a meaning of their own"),
    Name("parent", b"../other-run/checkpoint.json", "it climbs into another backup"),
    Name("parents", b"../../../home/.ssh/authorized_keys", "it climbs to the keys of the owner"),
    Name("inner-parent", b"logs/../../../../home/.bashrc", "it climbs after it went down"),
    Name("dotted", b"./..//../home/.bashrc", "dots and double slashes hide the climb"),
    Name("parent-alone", b"..", "the folder above is no file"),
    Name("dot", b".", "the folder itself is no file"),
    Name("empty", b"", "a file has a name"),
    Name("trailing-slash", b"logs/", "a name that ends in a slash is a folder's"),
    Name("trailing-dot", b"logs/.", "a name that ends in a dot segment is a folder's"),
    Name("backslash", b"..\\..\\home\\evil.txt", "a backslash separates on other systems", EITHER),
    Name("nul", b"evil\0.txt", "NUL ends a name early"),
    Name("newline", b"evil\nfake line.txt", "a newline forges a line of a log"),
    Name("return", b"evil\rfake.txt", "a carriage return hides what stands before it"),
    Name("escape", b"evil\x1b]0;owned\x07\x1b[2J.txt", "ESC drives the terminal"),
    Name("c1", b"evil\xc2\x9b2J.txt", "C1 controls drive the terminal as well"),
    Name("delete", b"evil\x7f.txt", "DEL is a control character"),
    Name("not-utf8", b"evil-\xff\xfe.txt", "the bytes are no text"),
    Name("surrogate", b"evil-\xed\xa0\x80.txt", "a lone surrogate is no text"),
    Name("300", b"n" * 300, "longer than a file system's limit, and no full disk"),
    Name("5000", b"n" * 5000, "longer than any limit"),
    Name("long-path", b"/".join([b"n" * 200] * 40), "each part is fine and the path is not"),
    Name("deep", b"d/" * 4000 + b"x", "4,000 folders below one another"),
    Name("dash", b"-rf", "a word that looks like an option", EITHER),
    Name("spaces", b"  two  spaces ", "blanks at both ends are part of a name", EITHER),
    Name("case-twin", b"MANIFEST.JSON", "the same name where case does not count", EITHER),
    Name("nfd", "caf\u0065\u0301.txt".encode(), "a decomposed letter has a twin", EITHER),
    Name("under-a-file", b"manifest.json/inner.txt", "a file and a folder of one name"),
    Name("record", b"backup.json", "the name of the backup's own record", EITHER),
    Name("part", b".manifest.json.part", "where the part of another file is collected", EITHER),
    Name("lock", b"../.far-run.lock", "the lock of the backup"),
    Name(
        "in-a-good-checkpoint",
        b"checkpoints/step_000010/model.safetensors",
        "a small file in the place of weights that are verified already",
    ),
    Name(
        "good-manifest",
        b"checkpoints/step_000010/checkpoint.json",
        "the manifest that a receipt names",
    ),
    Name(
        "new-checkpoint",
        b"checkpoints/step_000040/checkpoint.json",
        "a checkpoint that nothing verified",
    ),
    Name(
        "pulling", b"checkpoints/.pulling_step_000020/state.txt", "where a checkpoint is collected"
    ),
    Name("gone", b".gone/../../escape.txt", "it climbs from where old files are kept"),
)

#: The same for a file inside a checkpoint, where only plain names are right.
_KINDS = {
    "absolute", "parents", "dot", "empty", "escape", "300", "good-manifest",
}  # fmt: skip
IN_CHECKPOINT = tuple(name for name in NAMES if name.id in _KINDS)
