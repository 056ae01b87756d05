"""``python -m tests.random_programs``: see docs/design/random-programs.md."""

from __future__ import annotations

import pathlib
import sys

# As pytest finds them: the tests' own modules are imported from their folder, also in the ranks.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from random_programs import cli

    sys.exit(cli.main(sys.argv[1:]))
