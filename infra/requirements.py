"""Print what pyproject.toml asks for, one requirement a line, so that an image has it before it has our code.

python infra/requirements.py             what the API needs
python infra/requirements.py worker gpu  and what these extras add
"""

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def requirements(*extras: str) -> list[str]:
    """Return the requirements of the project with these extras; raise KeyError for an extra that is none."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    return [*project["dependencies"], *(line for e in extras for line in project["optional-dependencies"][e])]


if __name__ == "__main__":
    print("\n".join(requirements(*sys.argv[1:])))
