"""Runs a program against this service.

usage: python -m tinker_compat script.py [arguments]
       python -m tinker_compat -m module [arguments]
       python -m tinker_compat -c code [arguments]

In it, and in the processes that it starts with multiprocessing, `import tinker` gives our clients, in every library
that imports it too; and `import together.post_training.tinker` is this package, also where the official SDK is
installed.
"""

from __future__ import annotations

import sys

import tinker_compat
from tinker_compat import runner
from tinker_compat.aliases import swap_in
from tinker_compat.children import set_up


def main(arguments: list[str]) -> None:
    first, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if first in ("-h", "--help"):
        print(__doc__)
    elif first in ("-m", "-c") and rest:
        prepare()
        run = runner.run_module if first == "-m" else runner.run_command
        run(rest[0], rest[1:])
    elif first and not first.startswith("-"):
        prepare()
        runner.run_script(first, rest)
    else:
        print(__doc__, file=sys.stderr)
        sys.exit(runner.USAGE_STATUS)


def prepare() -> None:
    tinker_compat.install()
    swap_in()
    set_up(swap_in)


if __name__ == "__main__":
    main(sys.argv[1:])
