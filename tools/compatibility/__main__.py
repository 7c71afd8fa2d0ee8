"""Writes docs/compatibility.md, and fails for what is neither as in Tinker's SDK nor refused nor warned of.

python -m tools.compatibility              writes it; exit status 1 if something is unaccounted for, naming it
python -m tools.compatibility --check      writes nothing; exit status 1 also if it would change
python -m tools.compatibility --tests      runs the tests of the client with each version of the SDK, too
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

from tools.compatibility.compare import Verdict, compare
from tools.compatibility.observe import OBSERVATION, SURFACES, Observation
from tools.compatibility.report import Section, render
from tools.compatibility.surface import Surface
from tools.compatibility.versions import NEWEST, OLDEST, REPOSITORY, environment, run_module

DOCUMENT = REPOSITORY / "docs" / "compatibility.md"
# Scripts for the first, beside an installed second.
PAIRS = ((NEWEST, NEWEST), (OLDEST, NEWEST), (OLDEST, OLDEST))


def sections(pairs: tuple[tuple[str, str], ...] = PAIRS) -> Iterator[Section]:
    surfaces = {version: _surface(version) for version in dict.fromkeys(v for v, _ in pairs)}
    for installed in dict.fromkeys(i for _, i in pairs):
        wanted = [surfaces[version] for version, beside in pairs if beside == installed]
        seen = _observe(installed, wanted)
        for theirs in wanted:
            yield Section(theirs.version, installed, compare(theirs, seen))


def _surface(version: str) -> Surface:
    printed = run_module(version, "tools.compatibility.surface")
    (found,) = SURFACES.validate_json(b"[" + printed + b"]")
    assert found.version == version, f"asked for tinker {version}, got {found.version}"
    return found


def _observe(installed: str, surfaces: list[Surface]) -> Observation:
    printed = run_module(
        installed, "tools.compatibility.observe", stdin=SURFACES.dump_json(surfaces)
    )
    return OBSERVATION.validate_json(printed)


def unaccounted(section: Section) -> Iterator[str]:
    """What is neither as in Tinker's SDK, nor refused, nor warned of."""
    for finding in section.findings:
        if finding.verdict is Verdict.GAP:
            yield f"{section.title}: {finding.subject} {finding.text}"


def run_tests(version: str) -> int:
    """The exit status of the client's tests with that version."""
    print(f"The client's tests with tinker {version}:", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "tests/compat"]
    return subprocess.run(command, cwd=REPOSITORY, env=environment(version)).returncode


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tools.compatibility")
    options.add_argument("--check", action="store_true", help="write nothing")
    options.add_argument("--tests", action="store_true", help="run the client's tests, too")
    given = options.parse_args()
    found = list(sections())
    gaps = [line for section in found for line in unaccounted(section)]
    print("\n".join(gaps), file=sys.stderr)
    document = render(found)
    is_fresh = DOCUMENT.exists() and DOCUMENT.read_text() == document
    if given.check and not is_fresh:
        print(f"{DOCUMENT.name} is stale: run `make compat`", file=sys.stderr)
    elif not given.check:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(document)
    failed = [version for version in (OLDEST, NEWEST) if given.tests and run_tests(version)]
    return int(bool(gaps or failed or (given.check and not is_fresh)))


if __name__ == "__main__":
    sys.exit(main())
