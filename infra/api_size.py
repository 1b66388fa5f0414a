"""Add up what the packages of the `api` image take on disk, as they are installed here.

python -m infra.api_size        in the environment that `make` built; constraints.txt pins both alike
"""

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.requirements import requirements


def sizes(wanted: list[str]) -> dict[str, int]:
    """Return name -> bytes of these requirements and all that they require, compiled modules included."""
    found: dict[str, int] = {}
    left = [(Requirement(line), "") for line in wanted]
    seen = set()
    while left:
        requirement, extra = left.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for asked in {"", *requirement.extras}:
            if (name, asked) not in seen:
                seen.add((name, asked))
                left += [(Requirement(line), asked) for line in metadata.requires(name) or ()]
        found[name] = _bytes(name)
    return found


def _bytes(name: str) -> int:
    files = (Path(str(file.locate())) for file in metadata.files(name) or ())
    return sum(file.stat().st_size for file in files if file.is_file())


def main() -> None:
    """Print the packages, the largest first, and their sum."""
    found = sizes(requirements("otel"))
    for name, size in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{sum(found.values()) / 1e6:8.1f} MB  {len(found)} packages")


if __name__ == "__main__":
    main()
