"""The program that judges a `repair` repository, sent into its sandbox for one grading.

It is started with `-I -S`, its parent process never imports code of the repository, and the tests
are those it brings. A child is forked for each test file BEFORE the parent reads the nonce, so that
the code under test has neither the nonce nor a file that holds it; the child's output goes to
/dev/null, and it reports each test over a pipe once the test function has returned. Only lines that
carry the nonce count, and only the parent prints them.

What a determined attacker can still do: code under test shares an interpreter with the tests, so it
can walk the child's frames, find the pipe and claim that a test passed, or return an object that
equals everything. Where the kernel lets one process of a user trace another (ptrace_scope 0), it
can also read the nonce in the parent's memory.
"""

from __future__ import annotations

RUNNER = r"""
import os, select, sys

TESTBED, FILES, TESTS = os.getcwd(), __FILES__, __TESTS__
LIMIT = 1 << 16  # bytes of report that one child may send


def restore():
    for name, text in FILES.items():
        path = os.path.join(TESTBED, name)
        if os.path.isdir(path) and not os.path.islink(path):
            os.rename(path, path + ".moved")
        elif os.path.lexists(path):
            os.unlink(path)
        with open(path, "x") as file:
            file.write(text)


def child(name, go, report):
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in 0, 1, 2:
        os.dup2(quiet, fd)
    sys.path.insert(0, TESTBED)
    sys.argv = [name]
    sys.dont_write_bytecode = True
    write, leave = os.write, os._exit
    scope = {"__name__": name.removesuffix(".py"), "__file__": name}
    source = compile(FILES[name], name, "exec")
    if os.read(go, 1) != b"g":
        leave(3)
    exec(source, scope)
    for test in [key for key in scope if key.startswith("test_")]:
        try:
            scope[test]()
        except BaseException:
            write(report, f"{test} FAILED\n".encode())
        else:
            write(report, f"{test} PASSED\n".encode())
    write(report, b"end\n")
    leave(0)


def fork(name):
    go, start = os.pipe()
    read, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(start)
            os.close(read)
            child(name, go, report)
        finally:
            os._exit(4)
    os.close(go)
    os.close(report)
    return pid, start, read


def collect(read, pid):
    found, gone = b"", False
    while len(found) < LIMIT and not found.endswith(b"end\n"):
        if not select.select([read], [], [], 0 if gone else 0.05)[0]:
            if gone:
                break  # a process it left behind may hold the pipe open
            gone = os.waitpid(pid, os.WNOHANG)[0] != 0
            continue
        part = os.read(read, LIMIT)
        if not part:
            break
        found += part
    return found


def nonce_of(file):
    return open(file).read().rpartition("#")[2].strip()


def main():
    try:
        restore()
    except OSError as error:  # a full disk, a folder without write permission: the agent's doing
        print(nonce_of(__file__), "started", flush=True)
        sys.exit(f"cannot restore the tests: {error}")
    children = {name: fork(name) for name in TESTS}
    nonce = nonce_of(__file__)
    os.unlink(__file__)
    print(nonce, "started", flush=True)
    lines = []
    for name, (pid, start, read) in children.items():
        os.write(start, b"g")
        results = {}
        for line in collect(read, pid).decode(errors="replace").splitlines():
            test, _, result = line.partition(" ")
            if result:  # the first report of a test counts, unless a later one is worse
                results[test] = result if results.get(test, result) == result else "FAILED"
        lines += [f"{nonce} {name}::{test} {result}" for test, result in results.items()]
    print(*lines, f"{nonce} finished", sep="\n", flush=True)
    os._exit(0)


main()
"""


def render(files: dict[str, str], tests: list[str], nonce: str) -> str:
    """Return the program that restores `files` and runs the test files `tests`; `nonce` ends it."""
    program = RUNNER.replace("__FILES__", repr(files)).replace("__TESTS__", repr(tests))
    return f"{program}\n# {nonce}\n"
