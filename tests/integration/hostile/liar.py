"""What the fake pod runs in place of `sh`, Python and other tools: true answers, rewritten.

Called as `liar.py FOLDER REAL ARGUMENT...`. FOLDER/lie.json holds rules; without one that fits, the
real program is executed as it is. Bytes stand in the file as latin-1 text. It knows nothing of the
product but how a call may begin (`read` and `eval` of one line), so it lies to any wire protocol.
"""

# It stands before every tool of the pod, and pathlib would double its start.
# So would what only some lies need.
# ruff: noqa: PTH118, PTH119, PTH123

import json
import os
import signal
import sys
import time

FLOOD_S = 50.0
FLOOD_BYTES = 3 * 2**30


def text(value):
    return value.encode("latin-1")


class Liar:
    def __init__(self, folder, real, arguments) -> None:
        self.folder, self.real, self.arguments = folder, real, [os.fsencode(a) for a in arguments]
        self.rules = self.read_rules()
        self.environment = dict(os.environ)

    def read_rules(self):
        try:
            with open(os.path.join(self.folder, "lie.json"), encoding="ascii") as file:
                return json.load(file)
        except FileNotFoundError:
            return []

    def note(self, name, line) -> None:
        with open(os.path.join(self.folder, name), "a", encoding="ascii") as file:
            file.write(f"{line}\n")

    def execute(self) -> None:
        """The truth."""
        os.execve(self.real, [os.path.basename(self.real), *self.arguments], self.environment)

    def main(self) -> None:
        script = self.arguments[1] if self.arguments[:1] == [b"-c"] and self.arguments[1:] else b""
        if b"read " in script and b"eval" in script:
            self.begin()
        self.hide()
        line = b" ".join([os.fsencode(self.real), *self.arguments])
        fitting = [one for one in self.rules if "frame" not in one and text(one["asked"]) in line]
        if not fitting:
            self.execute()
        self.answer(fitting)

    def hide(self) -> None:
        """Programs below this one are real."""
        parts = self.environment.get("PATH", "").split(":")
        bin_folder = os.path.join(self.folder, "bin")
        self.environment["PATH"] = ":".join(part for part in parts if part != bin_folder)

    def begin(self) -> None:
        """One line of a framed call: answer it with a raw frame, or let the real shell run it."""
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(0, 1)
            if not piece:
                break
            line += piece
        import re

        nonce = re.search(rb"\b[0-9a-f]{32}\b", line)
        for rule in self.rules:
            if "frame" in rule and nonce and text(rule["asked"]) in line:
                self.send_frame(rule["frame"], nonce[0])
        self.environment["s"] = os.fsdecode(line.rstrip(b"\n"))
        words = ["sh", "-c", 'eval "$s" # IFS= read -r s && eval']
        os.execve("/bin/sh", words, self.environment)

    def send_frame(self, frame, nonce) -> None:
        self.note("hits", "frame")
        for name, fd in (("err", 2), ("out", 1)):
            one = text(frame.get(name, "")).replace(b"<N>", nonce)
            self.send(fd, one.replace(b"<P>", str(os.getpid()).encode()))
        if frame.get("repeat"):
            fd = {"out": 1, "err": 2}[frame.get("stream", "out")]
            self.flood(fd, text(frame["again"]), frame["repeat"], frame.get("pause_s", 0))
        time.sleep(frame.get("hold_s", 0))
        sys.exit(frame.get("code", 0))

    def send(self, fd, content) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]

    def flood(self, fd, piece, repeat, pause_s) -> None:
        """Send a piece again and again; what got through stands in `sent`."""
        import select

        end, total = time.monotonic() + FLOOD_S, 0
        path = os.path.join(self.folder, f"sent.{os.getpid()}")
        counter = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        while repeat and total < FLOOD_BYTES and time.monotonic() < end:
            # A reader that has gone is seen though the pipe still has room.
            if select.select([], [fd], [], 1.0)[1]:
                total += os.write(fd, piece)
                os.pwrite(counter, b"%020d" % total, 0)
                repeat -= 1
            if pause_s:
                time.sleep(pause_s)

    def swapped_request(self, rules):
        """The lies in a request become the truth again, so that the real tool finds it."""
        pairs = [(text(a), text(b), one) for one in rules for a, b in one.get("swap", [])]
        if not pairs:
            return None
        self.arguments = [self.true_word(word, pairs) for word in self.arguments]
        content = sys.stdin.buffer.read()
        for true, lie, _ in pairs:
            if len(lie) > 3:
                content = content.replace(lie, true)
                content = content.replace(quoted(lie), true)
        return content

    def true_word(self, word, pairs):
        for true, lie, rule in pairs:
            if not rule.get("serve") or len(lie) < 2:
                continue
            is_path = word.startswith(b"/") and b"\n" not in word.rstrip(b"\n")
            if word == lie and not is_path:
                return true
            core = lie.strip(b"./")
            if is_path and len(core) > 2 and core in word:
                return text(rule["serve"])
        return word

    def answer(self, rules) -> None:
        import subprocess

        content = self.swapped_request(rules)
        given = {"stdin": None} if content is None else {"input": content}
        for rule in rules:
            if "prepare" in rule:
                subprocess.run(
                    ["/bin/sh", "-c", rule["prepare"]], env=self.environment, check=False
                )
        if any(one.get("skip") for one in rules):
            self.real, self.arguments = "/bin/true", []
        done = subprocess.run(
            [self.real, *self.arguments],
            stdout=subprocess.PIPE,
            env=self.environment,
            check=False,
            **given,
        )
        out, code = done.stdout, done.returncode
        told = [one for one in rules if text(one["answer"]) in out and self.is_time(one)]
        for rule in told:
            self.note("hits", "answer")
            if "script" in rule:
                subprocess.run(["/bin/sh", "-c", rule["script"]], env=self.environment, check=False)
            out = rewritten(out, rule)
            code = rule.get("code", code)
        self.send(1, out)
        for rule in told:
            if rule.get("repeat"):
                fd = {"out": 1, "err": 2}[rule.get("stream", "out")]
                self.flood(fd, text(rule["again"]), rule["repeat"], rule.get("pause_s", 0))
        sys.exit(code if code >= 0 else 128 - code)

    def is_time(self, rule):
        """Whether this is the call that is lied to."""
        if "nth" not in rule:
            return True
        name = f"count.{rule['nth']}"
        self.note(name, "x")
        with open(os.path.join(self.folder, name), encoding="ascii") as file:
            return len(file.read().split()) == rule["nth"]


def quoted(content):
    """Bytes as they stand inside a JSON text."""
    return json.dumps(content.decode("utf-8", "surrogateescape"))[1:-1].encode()


def rewritten(out, rule):
    if "instead" in rule:
        out = text(rule["instead"])
    is_json = out.lstrip()[:1] in (b"{", b"[")
    for true, lie in rule.get("swap", []):
        out = out.replace(text(true), quoted(text(lie)) if is_json else text(lie))
    if "cut" in rule:
        out = out[: rule["cut"]]
    return text(rule.get("before", "")) + out + text(rule.get("after", ""))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    Liar(sys.argv[1], sys.argv[2], sys.argv[3:]).main()
